"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from full_disk import no_file_beyond

from fagen.cli import app as cli
from fagen.errors import ArgumentError, WriteError
from fagen.files import write_file, write_files


def test_the_folder_is_made_files_are_replaced_and_no_drafts_stay(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write_files({"x.cu": "old", "y.cubin": b"\x7fELF"}, folder)
    assert write_files({"x.cu": "new"}, folder) == [folder / "x.cu"]
    assert (folder / "x.cu").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["x.cu", "y.cubin"]


def test_a_folder_and_a_file_in_each_others_place_are_the_callers_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="is not a folder"):
        write_files({"x.cu": ""}, tmp_path / "file")
    with pytest.raises(ArgumentError, match="is a folder"):
        write_file(tmp_path, "")


def test_a_pipe_is_written_to() -> None:
    ours, theirs = os.pipe()
    write_file(Path(f"/dev/fd/{theirs}"), "text")
    assert os.read(ours, 9) == b"text"
    os.close(ours)
    os.close(theirs)


def test_a_link_stays_a_link_and_the_mode_what_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch(mode=0o600)
    link.symlink_to(file)
    write_file(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.cu"
    write_file(path, "old")
    with no_file_beyond(9), pytest.raises(WriteError, match=r"x\.cu: File too large"):
        write_file(path, "longer than nine bytes")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_below_a_file_is_one_line_and_exit_code_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"
    words = ("--arch", "sm90", "--dtype", "bf16", "--head-dim", "64", "-o", str(folder))
    assert cli.main(["emit", *words]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"fagen: cannot write {folder}/forward_bf16_d64_full_sm90.cu: Not a directory\n"
