"""A private PostgreSQL server: in a temporary folder, behind a unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_SECONDS = 60.0


def why_no_server() -> str | None:
    """What is missing, or None if `server` can run."""
    if _programs() is None:
        return "no PostgreSQL server is installed (apt-get install postgresql)"
    if find_spec("psycopg") is None:
        return 'no driver for PostgreSQL is installed (pip install "psycopg[binary]")'
    return None


def _programs() -> Path | None:
    """The folder of initdb and postgres, which Debian keeps off PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found := shutil.which("initdb"):
        folders.insert(0, Path(found).resolve().parent)
    return next((path for path in folders if (path / "postgres").exists()), None)


@contextmanager
def server() -> Iterator[str]:
    """Runs a server. Yields the URL of a fresh database for SQLAlchemy, without a driver's name."""
    programs = _programs()
    assert programs is not None
    # Not below pytest's folders, which another user cannot enter: the server refuses root.
    folder = Path(tempfile.mkdtemp(prefix="fagen-pg-"))
    user = None
    if os.geteuid() == 0:
        user = "nobody"
        shutil.chown(folder, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
    options: dict[str, Any] = {"user": user, "cwd": folder, "stdout": subprocess.DEVNULL}
    try:
        subprocess.run(
            [programs / "initdb", "-D", folder / "data", "-U", "fagen", "-A", "trust", "--no-sync"],
            check=True,
            **options,
        )
        settings = ["listen_addresses=", f"unix_socket_directories={folder}", "fsync=off"]
        words = [word for setting in settings for word in ("-c", setting)]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(
                [programs / "postgres", "-D", folder / "data", *words], stderr=log, **options
            ) as process,
        ):
            try:
                deadline = time.monotonic() + START_SECONDS
                ready = [str(programs / "pg_isready"), "-q", "-h", str(folder), "-U", "fagen"]
                while subprocess.run(ready, check=False).returncode:
                    assert process.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < deadline, (folder / "log").read_text()
                    time.sleep(0.05)
                yield f"postgresql://fagen@/postgres?host={folder}"
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
    finally:
        shutil.rmtree(folder)
