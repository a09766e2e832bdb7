"""The YAML files of tuned configs: what is read, what is refused, what survives."""

from __future__ import annotations

import multiprocessing
import os
import time
import timeit
from pathlib import Path
from typing import Any

import pytest
import yaml
from full_disk import no_file_beyond
from pydantic import ValidationError
from records import H200, some_record

from fagen import files
from fagen.errors import StoreError, WriteError
from fagen.files import packaged_folder
from fagen.kernels.registry import default_config
from fagen.problem import Problem
from fagen.records import store, yaml_file
from fagen.records.store import (
    Store,
    TunedConfig,
    check_can_save,
    load_records,
    save_records,
)

PROBLEM = Problem(dtype="bf16", head_dim=128, causal=True)


def make_record(
    problem: Problem = PROBLEM, seqlen: int = 4096, kind: Any = "measured", **result: Any
) -> TunedConfig:
    config = default_config(problem, H200)
    return some_record(problem, config, seqlen=seqlen, kind=kind, **result)


def many_records() -> list[TunedConfig]:
    problems = [
        Problem(dtype=dtype, head_dim=head_dim, causal=causal)
        for dtype in ("fp16", "bf16")
        for head_dim in (64, 96, 128, 192, 256)
        for causal in (True, False)
    ]
    return [make_record(p, seqlen) for p in problems for seqlen in (1 << n for n in range(5, 15))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sm90.yaml"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# ---- round trip ----


def test_records_come_back_equal_and_the_bytes_do_not_depend_on_the_order(path: Path) -> None:
    records = many_records()[:30]
    save_records(path, records)
    first = path.read_bytes()
    assert set(load_records(path).records) == set(records)

    save_records(path, [])  # read and written again
    assert path.read_bytes() == first
    other = path.with_name("other.yaml")
    for record in reversed(records):
        save_records(other, [record])
    assert other.read_bytes() == first


SHIPPED = sorted(packaged_folder("tuned_configs").glob("*.yaml"))
FIRST_LANDING = Path(__file__).parent / "data" / "first_landing.yaml"


@pytest.mark.parametrize("shipped", [*SHIPPED, FIRST_LANDING], ids=lambda path: path.stem)
def test_a_shipped_file_is_as_it_would_be_written(shipped: Path, path: Path) -> None:
    path.write_bytes(shipped.read_bytes())
    file = load_records(path)
    assert file.skipped == ()
    assert file.records
    save_records(path, [])  # read and written again
    assert path.read_bytes() == shipped.read_bytes()
    path.unlink()
    save_records(path, reversed(file.records))
    assert path.read_bytes() == shipped.read_bytes()


def test_the_text_is_readable_and_every_axis_can_be_edited(path: Path) -> None:
    save_records(path, [make_record()])
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert "schema: 1" in lines
    assert "- problem: {dtype: bf16, head_dim: 128, causal: true}" in lines
    assert all(axis in path.read_text() for axis in make_record().config.axes())
    assert "predicted" not in path.read_text()


def test_numbers_are_rounded_when_a_record_is_made() -> None:
    assert make_record(median_us=123.456789).result.median_us == 123.46
    with pytest.raises(ValidationError):
        make_record(median_us=float("nan"))


def test_a_file_without_a_measurement_says_so(path: Path) -> None:
    save_records(path, [make_record(kind="predicted")])
    assert "# Predicted" in path.read_text()
    save_records(path, [make_record()])
    assert "# Predicted" not in path.read_text()


# ---- merging ----


def test_one_record_per_key_and_the_new_one_wins(path: Path) -> None:
    save_records(path, [make_record(median_us=100)])
    save_records(path, [make_record(median_us=90), make_record(seqlen=512)])
    assert [r.result.median_us for r in load_records(path).records] == [123.4, 90]


def test_a_prediction_never_displaces_a_measurement(path: Path) -> None:
    measured, predicted = make_record(), make_record(kind="predicted", median_us=1)
    save_records(path, [measured])
    save_records(path, [predicted])
    assert load_records(path).records == (measured,)

    save_records(path.with_name("b.yaml"), [predicted])
    save_records(path.with_name("b.yaml"), [measured, predicted])
    assert load_records(path.with_name("b.yaml")).records == (measured,)


@pytest.mark.parametrize("first", ["measured", "predicted"])
def test_of_two_records_in_a_file_the_measured_one_counts(path: Path, first: str) -> None:
    save_records(path, [make_record()])
    head, item = path.read_text().split("- problem", 1)
    other = item.replace("kind: measured", "kind: predicted")
    items = [item, other] if first == "measured" else [other, item]
    path.write_text(head + "".join(f"- problem{text}" for text in items))
    assert [record.result.kind for record in load_records(path).records] == ["measured"]


# ---- what a newer version wrote ----


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("head_dim: 128,", "head_dim: 128, window: 64,", "window"),
        ("block_m: 128,", "block_m: 128, kv_splits: 2,", "kv_splits"),
        ("block_m: 128,", "block_m: 1000,", "block_m"),
        ("forward_sm90", "forward_sm100", "forward_sm100"),
        ("axes_version: 1", "axes_version: 2", "axes_version is 2"),
        ("arch: sm90", "arch: sm130", "sm130"),
        ("  axes_version: 1\n", "  axes_version: 1\n  tie_set: [{block_m: 64}]\n", "tie_set"),
    ],
)
def test_what_this_version_does_not_know_is_skipped_and_kept(
    path: Path, old: str, new: str, reason: str
) -> None:
    save_records(path, [make_record(), make_record(seqlen=512)])
    edit(path, old, new)  # of the first in the file
    file = load_records(path)
    assert [record.shape.seqlen_q for record in file.records] == [4096]
    [skipped] = file.skipped
    assert reason in skipped.reason
    assert path.read_text().splitlines()[skipped.line - 1].startswith("- problem")

    save_records(path, [make_record(seqlen=1024)])
    again = load_records(path)
    assert len(again.records) == 2
    assert [entry.fields for entry in again.skipped] == [skipped.fields]


def test_a_file_of_another_schema_gives_nothing_and_is_not_written(path: Path) -> None:
    save_records(path, [make_record()])
    edit(path, "schema: 1", "schema: 2")
    before = path.read_bytes()
    assert load_records(path).records == ()
    assert "schema is 2" in load_records(path).skipped[0].reason
    with pytest.raises(StoreError, match="schema is 2"):
        save_records(path, [make_record()])
    assert path.read_bytes() == before


# ---- what is refused ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 1\nrecords: !!python/object/apply:os.system ['touch ran']\n", "line 2: the tag"),
        ("schema: 1\nrecords:\n- {a: !!python/name:os.system }\n", "line 3: the tag"),
        ("schema: 1\nrecords:\n- &a {x: 1}\n- *a\n", "line 4: the alias"),
        ("schema: 1\nrecords: " + "[" * 100 + "]" * 100, "nested more than"),
        ("schema: 1\nschema: 2\n", "line 2: schema is given twice"),
        ("schema: 1\nrecords: []\n--- \nschema: 1\n", "second document"),
        ("schema: 1\nrecords: 5\n", "has to be a list"),
        ("- 1\n- 2\n", "not a file of tuned configs"),
        ("", "not a file of tuned configs"),
        ("schema: 1\nrecords: []\nother: 1\n", "not a file of tuned configs"),
        ("schema: 1\nrecords: [2026-99-99]\n", "not YAML"),
        ("a: \x00\n", "not YAML"),
        (b"\xff\xfe\xfa", "not a text file"),
    ],
)
def test_a_file_that_is_no_file_of_records_is_refused_in_one_line(
    path: Path, text: str | bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StoreError, match=message) as caught:
        load_records(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir() == [path.name]  # nothing ran


def test_a_torn_file_is_never_dropped(path: Path) -> None:
    save_records(path, many_records()[:5])
    whole = path.read_bytes()
    torn = whole[: whole.rindex(b"spread") if b"spread" in whole else len(whole) - 20]
    path.write_bytes(torn)
    with pytest.raises(StoreError, match=r"line \d+: .*restore the file"):
        save_records(path, [make_record()])
    assert path.read_bytes() == torn


def test_at_any_torn_byte_nothing_is_lost_silently(path: Path) -> None:
    """Either the file is refused, or each record that is not whole is among the skipped."""
    save_records(path, [make_record(), make_record(seqlen=512)])
    whole = path.read_bytes()
    refused = 0
    for size in range(whole.index(b"- problem"), len(whole) - 1):
        path.write_bytes(whole[:size])
        started = whole[:size].count(b"\n- ")
        try:
            file = load_records(path)
        except StoreError:
            refused += 1
        else:
            assert len(file.records) + len(file.skipped) >= started
    assert refused > 500


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(StoreError, match=rf"cannot read {path}: No such file"):
        load_records(path)


# ---- writing under trouble ----


def test_a_full_disk_leaves_the_file_as_it_was(path: Path) -> None:
    save_records(path, [make_record()])
    before = path.read_bytes()
    with no_file_beyond(len(before) + 9), pytest.raises(WriteError, match="File too large"):
        save_records(path, [make_record(seqlen=512)])
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*draft*"))
    save_records(path, [make_record(seqlen=512)])
    assert len(load_records(path).records) == 2


def test_an_unusable_folder_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        save_records(tmp_path / "file" / "sm90.yaml", [make_record()])


def test_a_link_stays_a_link_and_the_mode_stays(path: Path, tmp_path: Path) -> None:
    save_records(path, [make_record()])
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    save_records(link, [make_record(seqlen=512)])
    assert link.is_symlink()
    assert len(load_records(path).records) == 2
    assert path.stat().st_mode & 0o777 == 0o640


def write_one_by_one(path: Path, dtype: Any, causal: bool) -> None:
    problem = Problem(dtype=dtype, head_dim=64, causal=causal)
    for n in range(10):
        save_records(path, [make_record(problem, 1 << n)])


def test_four_writers_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=write_one_by_one, args=(path, dtype, causal))
        for dtype in ("fp16", "bf16")
        for causal in (True, False)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(load_records(path).records) == 40


# ---- the files that count ----


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(user's, shipped) path of sm90, in place of the real ones."""
    monkeypatch.delenv(store.CONFIG_VARIABLE, raising=False)
    for name in ("user", "shipped"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(store, "user_overlay_path", lambda arch: tmp_path / "user" / f"{arch}.yaml")
    monkeypatch.setattr(store, "shipped_path", lambda arch: tmp_path / "shipped" / f"{arch}.yaml")
    store._open.cache_clear()
    return tmp_path / "user" / "sm90.yaml", tmp_path / "shipped" / "sm90.yaml"


def test_the_users_records_come_before_the_shipped(places: tuple[Path, Path]) -> None:
    for place in places:
        save_records(place, [make_record()])
    entries = Store.open().entries("sm90", PROBLEM)
    assert [entry.path for entry in entries] == list(places)
    assert Store.open().entries("sm80", PROBLEM) == []
    assert len(Store.open().records()) == 2


def test_a_named_file_is_consulted_alone(
    places: tuple[Path, Path], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_records(places[0], [make_record()])
    save_records(path, [make_record(seqlen=512)])
    monkeypatch.setenv(store.CONFIG_VARIABLE, str(path))
    assert [entry.path for entry in Store.open().entries("sm90", PROBLEM)] == [path]
    assert Store.open(places[0]).config_file == places[0]  # --config before FAGEN_CONFIG
    monkeypatch.setenv(store.CONFIG_VARIABLE, str(path.with_name("missing.yaml")))
    with pytest.raises(StoreError, match=r"cannot read .*missing\.yaml"):
        Store.open().entries("sm90", PROBLEM)
    monkeypatch.delenv(store.CONFIG_VARIABLE)
    assert [entry.path for entry in Store.open().entries("sm90", PROBLEM)] == [places[0]]


def test_a_process_sees_what_it_saved(places: tuple[Path, Path]) -> None:
    assert Store.open().records() == []
    save_records(places[0], [make_record()])
    assert Store.open().records() == [make_record()]
    assert Store.open() is Store.open()


def test_the_real_places_exist_or_can() -> None:
    assert store.shipped_path("sm90").parent.is_dir()
    assert store.user_overlay_path("sm90").parts[-2:] == ("tuned_configs", "sm90.yaml")


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML has no libyaml here")
def test_two_hundred_records_load_quickly(path: Path) -> None:
    """A first call waits for it: 28 ms on a small machine, which the limit leaves room around."""
    save_records(path, many_records())
    yaml_file._resolved.cache_clear()
    assert len(load_records(path).records) == 200
    assert yaml_file._resolved.cache_info().misses < 150  # each distinct scalar once

    # The best of several: other work on the machine only ever adds to it.
    timer = timeit.Timer(lambda: load_records(path), timer=time.process_time)
    assert min(timer.repeat(number=1, repeat=8)) < 0.1


def test_what_cannot_be_written_is_known_before_the_search(path: Path) -> None:
    check_can_save(path)
    assert not path.exists()
    save_records(path, [make_record()])
    before = path.read_bytes()
    check_can_save(path)
    assert path.read_bytes() == before
    path.write_text("torn: [")
    for where in (path, path.parent, path / "below.yaml", "/dev/full", "/proc/x.yaml"):
        with pytest.raises(StoreError):
            check_can_save(where)


def test_an_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="not a file of tuned configs"):
        load_records("/dev/zero")


def test_a_place_that_cannot_be_written_says_so_at_once(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    for place in (loop, Path("/proc/x.yaml")):
        start = time.monotonic()
        with pytest.raises(WriteError, match="name one that can be written"):
            save_records(place, [])
        assert time.monotonic() - start < 10


def test_a_file_that_another_process_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    path = tmp_path / "tuned.yaml"
    with files.locked(path), pytest.raises(WriteError, match="another process has held it"):
        save_records(path, [])


def test_what_is_no_record_is_skipped_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text("schema: 1\nrecords:\n# a comment\n- 7\n- seven\n- {problem: 7}\n")
    assert [entry.line for entry in load_records(path).skipped] == [4, 5, 6]
