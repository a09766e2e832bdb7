"""What was tuned, in tuned_configs/*.yaml and the user's overlay.

A file holds one record per (device, problem, bucket). Its text is canonical: the same records
give the same bytes, and a retuned record is a diff of a few lines.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fagen.device import ARCHITECTURES, Device, device_key
from fagen.errors import StoreError
from fagen.files import locked, packaged_folder, replace_file
from fagen.kernels.registry import TEMPLATES, AnyConfig, template_of
from fagen.problem import Bucket, Problem, Shape
from fagen.records.yaml_file import SCHEMA, list_text, read_list
from fagen.validation import one_line

CONFIG_VARIABLE = "FAGEN_CONFIG"
generation = 0  # how often this process has saved records: what was chosen before may be outdated
_log = logging.getLogger(__name__)


# ---- the record ----


def _rounded(value: float) -> float:
    """Five significant digits: more is noise, and would be noise in every diff."""
    return float(f"{value:.5g}")


Rounded = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_rounded)]


class _Part(BaseModel):
    # A field that this version does not know makes the record unreadable, hence skipped.
    model_config = ConfigDict(frozen=True, extra="forbid")


class Card(_Part):
    """The device that a record was made on or for.

    Attributes:
        name: the driver's name, such as "NVIDIA H200".
        sm_count: multiprocessors.
        arch: the architecture's name, such as "sm90".
    """

    name: str
    sm_count: int = Field(ge=1)
    arch: str

    @classmethod
    def of(cls, device: Device) -> Self:
        return cls(name=device.name, sm_count=device.sm_count, arch=device.arch.name)

    @property
    def key(self) -> str:
        """The same as `Device.key`."""
        return device_key(self.name, self.sm_count)

    def __str__(self) -> str:
        return self.key


class Result(_Part):
    """How fast the config is, and how that is known.

    Attributes:
        kind: "measured" on the device, or "predicted" by the static model where there was none.
        median_us: time of one call in microseconds.
        spread: interquartile range over median; None for a prediction.
        tflops: 1e12 floating-point operations per second, counted by `Shape.flops`.
        trials: distinct configs that were timed, or ranked by the model.
        tied: how many of those timed side by side at the end were no slower, itself included.
        speedup_over_default: time of the template's default over `median_us`.
        speedup_over_torch: time of torch SDPA over `median_us`; None where torch was absent.
        policy: how time was taken, such as "cold-queued"; "model" for a prediction.
    """

    kind: Literal["measured", "predicted"]
    median_us: Annotated[Rounded, Field(gt=0)]
    spread: Rounded | None = None
    tflops: Rounded
    trials: int = Field(ge=1)
    tied: int | None = Field(default=None, ge=1)
    speedup_over_default: Rounded | None = None
    speedup_over_torch: Rounded | None = None
    policy: str


class Provenance(_Part):
    """What made the record. A difference from today's is no reason to drop it.

    Attributes:
        date: UTC day.
        fagen, nvrtc: versions.
        driver: the newest CUDA version that the driver knows; None for a prediction.
        text, cubin: `digest` of the rendered text and of its cubin.
    """

    date: date
    fagen: str
    nvrtc: str
    driver: str | None = None
    text: str
    cubin: str

    @classmethod
    def of(cls, source: str, cubin: bytes, *, nvrtc: str, driver: str | None = None) -> Self:
        """Today's provenance of a compiled text."""
        from fagen import __version__

        return cls(
            date=datetime.now(UTC).date(),
            fagen=__version__,
            nvrtc=nvrtc,
            driver=driver,
            text=digest(source),
            cubin=digest(cubin),
        )


class TunedConfig(_Part):
    """One answer that was found by tuning.

    Attributes:
        problem: the static question.
        shape: the lengths that it was tuned on; their bucket is what it is filed under.
        device: the card.
        config: the answer.
        result, provenance: how good it is, and where it comes from.
    """

    problem: Problem
    shape: Shape
    device: Card
    config: AnyConfig
    result: Result
    provenance: Provenance

    @cached_property
    def bucket(self) -> Bucket:
        """Not stored: `Shape.bucket` is the one place where shapes are rounded."""
        return self.shape.bucket()

    @property
    def key(self) -> tuple[str, Problem, Bucket]:
        """What there is one record for."""
        return self.device.key, self.problem, self.bucket

    @property
    def measured(self) -> bool:
        """Whether its time was taken on the card, and not predicted."""
        return self.result.kind == "measured"


def digest(data: str | bytes) -> str:
    """The start of the SHA-256 of a text or cubin, 16 hex digits: enough to tell two apart."""
    raw = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(raw).hexdigest()[:16]


# ---- reading ----


class Skipped(NamedTuple):
    """A record that this version cannot use, most often one of a newer version.

    Attributes:
        line: where it starts in the file, from 1.
        reason: one sentence.
        fields: what stands in the file, which `save_records` writes back.
    """

    line: int
    reason: str
    fields: Any


@dataclass(frozen=True)
class RecordFile:
    """What one YAML file holds: a record per key in canonical order, and what was skipped."""

    path: Path
    records: tuple[TunedConfig, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def load_records(path: str | Path) -> RecordFile:
    """Every record of a file. Of two with one key the better stays: measured, then the later.

    Raises:
        StoreError: the file is missing, damaged, not a file of tuned configs, or holds a YAML tag
            or alias. Nothing that stands in a file is ever run.
    """
    path = Path(path)
    schema, items = read_list(
        path, "records", kind="tuned configs", writer="`fagen tune --out FILE`"
    )
    skipped = []
    if schema != SCHEMA:
        reason = f"its schema is {schema!r}, this fagen reads {SCHEMA}"
        skipped.append(Skipped(1, f"the whole file: {reason}", None))
    records: dict[Any, TunedConfig] = {}
    for item in items:
        try:
            record = _parse(item.content)
        except (ValidationError, ValueError) as error:
            reason = one_line(error) if isinstance(error, ValidationError) else str(error)
            skipped.append(Skipped(item.line, reason, item.content))
        else:
            _keep_better(records, record)
    for entry in skipped:
        _log.info("%s, line %d: record skipped: %s", path, entry.line, entry.reason)
    return RecordFile(path, tuple(sorted(records.values(), key=_order)), tuple(skipped))


def _parse(item: Any) -> TunedConfig:
    """The record of one list item.

    Raises:
        ValueError: it is not one that this version understands (ValidationError included).
    """
    if not isinstance(item, dict):
        raise ValueError("not a mapping")
    fields = dict(item)
    version = fields.pop("axes_version", None)
    template = item["config"].get("template") if isinstance(item.get("config"), dict) else None
    if not isinstance(template, str) or template not in TEMPLATES:
        raise ValueError(f"template {template!r} is none of {', '.join(TEMPLATES)}")
    current = TEMPLATES[template].AXES_VERSION
    if version != current:
        raise ValueError(f"axes_version is {version!r}, that of {template} is {current}")
    record = TunedConfig.model_validate(fields)
    if record.device.arch not in ARCHITECTURES:
        raise ValueError(f"architecture {record.device.arch!r} is unknown")
    return record


def _keep_better(records: dict[Any, TunedConfig], record: TunedConfig) -> None:
    """File a record under its key, unless a measured one would give way to a prediction."""
    old = records.get(record.key)
    if old is None or record.measured or not old.measured:
        records[record.key] = record


def _order(record: TunedConfig) -> tuple[Any, ...]:
    device = (record.device.arch, record.device.key)
    return (problem_order(record.problem), device, bucket_order(record.bucket))


def problem_order(problem: Problem) -> tuple[Any, ...]:
    """What problems are sorted by in a file: their fields, in the order of declaration."""
    return tuple((value is not None, value) for value in problem.model_dump().values())


def bucket_order(b: Bucket) -> tuple[int, ...]:
    """What buckets of one problem are sorted by in a file."""
    return (b.seqlen_q, b.seqlen_k, b.batch_heads, b.group)


# ---- writing ----


def save_records(path: str | Path, records: Iterable[TunedConfig]) -> None:
    """Merge records into a file, which is created if there is none.

    A record replaces the one with its key, but a predicted one never replaces a measured one.
    What this version cannot read is kept. Safe under concurrent writers (a lock file stays
    beside the file) and kill -9 (the file is replaced as a whole). Comments are not kept.

    Raises:
        StoreError: the file is damaged, of another schema, or cannot be written; it is as it was.
    """
    global generation  # noqa: PLW0603
    with _to_change(path) as old:
        merged = {record.key: record for record in old.records}
        for record in records:
            _keep_better(merged, record)
        replace_file(old.path, _text(merged.values(), old.skipped))
    _open.cache_clear()  # this process sees what it saved
    generation += 1


def check_can_save(path: str | Path) -> None:
    """Find out before hours of search whether `save_records` can write there.

    At most the folder and the lock file are made.

    Raises:
        StoreError: what `save_records` would raise.
    """
    with _to_change(path) as old:
        if not os.access(old.path if old.path.exists() else old.path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _to_change(path: str | Path) -> Iterator[RecordFile]:
    """What stands in a file of records, under its lock; an OSError becomes a StoreError."""
    with locked(path) as place:
        old = load_records(place) if place.exists() else RecordFile(place)
        if any(entry.fields is None for entry in old.skipped):
            raise StoreError(f"cannot add to {place}: {old.skipped[0].reason}: use a new file")
        yield old


_HEADER = """\
# Tuned configs of fagen, written by `fagen tune`; see README.md in tuned_configs of its source.
# To try another config, copy this file, edit the copy, and name it in --config or FAGEN_CONFIG.
"""
_PREDICTED = "# Predicted by the static model, every one: no such card was there to measure on.\n"


def _text(records: Iterable[TunedConfig], skipped: Iterable[Skipped]) -> str:
    """The canonical text of a file: one line or two for each part of a record."""
    ordered = sorted(records, key=_order)
    items = [*map(_fields, ordered), *(entry.fields for entry in skipped)]
    header = _HEADER
    if ordered and not any(record.measured for record in ordered):
        header += _PREDICTED
    return header + list_text("records", items)


def _fields(record: TunedConfig) -> dict[str, Any]:
    """A record as it stands in a file. Every axis is written, to be edited."""
    return {
        "problem": problem_fields(record.problem),
        "shape": record.shape.model_dump(),
        "device": record.device.model_dump(),
        "config": record.config.model_dump(),
        "axes_version": template_of(record.config).AXES_VERSION,
        "result": record.result.model_dump(exclude_none=True),
        "provenance": record.provenance.model_dump(exclude_none=True),
    }


def problem_fields(problem: Problem) -> dict[str, Any]:
    """Only what is not the default, so that a problem may grow fields; and what all have."""
    common = problem.model_dump(include={"dtype", "head_dim", "causal"})
    return common | problem.model_dump(exclude_defaults=True)


# ---- the files that a call looks into ----


def user_overlay_path(arch: str) -> Path:
    """Where `fagen tune` keeps this user's records of an architecture, such as "sm90"."""
    from platformdirs import user_data_path

    return user_data_path("fagen", appauthor=False) / "tuned_configs" / f"{arch}.yaml"


def shipped_path(arch: str) -> Path:
    """The records of an architecture that come with fagen."""
    return packaged_folder("tuned_configs") / f"{arch}.yaml"


class Entry(NamedTuple):
    """A record and the file that it stands in."""

    record: TunedConfig
    path: Path


class Store:
    """The records that dispatch may use. `Store.open` finds them.

    Attributes:
        config_file: the one file that is consulted, or None for the user's overlay and then the
            shipped file of each architecture.
    """

    def __init__(self, config_file: Path | None = None) -> None:
        self.config_file = config_file
        self._loaded: dict[Path, RecordFile] = {}

    @classmethod
    def open(cls, config_file: str | Path | None = None) -> Store:
        """The store of this process: each file is read once, when it is first needed.

        Args:
            config_file: another YAML (`--config`), or else the one that FAGEN_CONFIG names. It
                is consulted alone, so that what stands in it is what runs.
        """
        named = config_file or os.environ.get(CONFIG_VARIABLE)
        return _open(Path(named).expanduser().absolute() if named else None)

    def files(self, arch: str | None = None) -> tuple[RecordFile, ...]:
        """The files of an architecture (of all, if None), the one that counts more first.

        Raises:
            StoreError: one of them is damaged, or `config_file` does not exist.
        """
        if self.config_file:
            return (self._load(self.config_file),)
        paths = [
            path
            for name in ([arch] if arch else ARCHITECTURES)
            for path in (user_overlay_path(name), shipped_path(name))
        ]
        return tuple(self._load(path) for path in paths if path.exists())

    def entries(self, arch: str | None = None, problem: Problem | None = None) -> list[Entry]:
        """The records of an architecture (of all, if None), the user's own before the shipped.

        Args:
            problem: only this problem's.
        """
        return [
            Entry(record, file.path)
            for file in self.files(arch)
            for record in file.records
            if arch in (None, record.device.arch) and problem in (None, record.problem)
        ]

    def records(self, arch: str | None = None) -> list[TunedConfig]:
        """The records of `entries`."""
        return [record for record, _ in self.entries(arch)]

    def _load(self, path: Path) -> RecordFile:
        if path not in self._loaded:
            self._loaded[path] = load_records(path)
        return self._loaded[path]


@cache
def _open(config_file: Path | None) -> Store:
    return Store(config_file)
