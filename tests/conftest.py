"""What all tests share: a private cache and home, and the skip of `gpu` tests without a device."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

import fagen.show
from fagen.errors import FagenError
from fagen.records.store import CONFIG_VARIABLE
from fagen.run import driver

# A shell's background job ignores Ctrl-C, and its children inherit that: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _why_no_device() -> str | None:
    try:
        return None if driver.device_count() else "the driver sees no CUDA device"
    except FagenError as error:
        return str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_device() if for_gpu else None
    if reason:
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's records or cache.

    A FAGEN_CACHE that is set stays, so that a second run need not compile again.
    """
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(CONFIG_VARIABLE, raising=False)
        for variable in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(variable, str(home / variable))
        if "FAGEN_CACHE" not in os.environ:
            patch.setenv("FAGEN_CACHE", str(home / "cache"))
        yield


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if matplotlib were not installed, and what needs it not imported yet."""
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("plots", "report"):
        monkeypatch.delitem(sys.modules, f"fagen.show.{name}", raising=False)
        monkeypatch.delattr(fagen.show, name, raising=False)
