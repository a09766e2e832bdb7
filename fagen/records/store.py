"""tuned_configs/*.yaml and the user's overlay: the only module that reads or writes them.

A file holds one record per (device, problem, bucket). Its text is canonical: the same records
give the same bytes, and a retuned record is a diff of a few lines. YAML is read event by event,
with no object construction, so a tag or an alias is refused before it can mean anything.
The files of recorded calls, which say what to tune, are kept in the same way.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from fagen.device import ARCHITECTURES, Device
from fagen.errors import StoreError, WriteError, one_line
from fagen.files import link_target, packaged_folder, replace_file
from fagen.kernels.registry import TEMPLATES, AnyConfig, template_of
from fagen.problem import Bucket, Problem, Shape

SCHEMA = 1  # of the file as a whole; a field that is new in a record does not raise it
CONFIG_VARIABLE = "FAGEN_CONFIG"
LOCK_SECONDS = 60.0
MAX_BYTES = 64 << 20  # of a file: a record takes 800
MAX_DEPTH = 8  # of nested collections: a record needs 4
_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_log = logging.getLogger(__name__)

on_save: list[Callable[[], None]] = []  # called when this process saved records


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
        return f"{self.name} ({self.sm_count} SMs)"

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


class Record(_Part):
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
    records: tuple[Record, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def load_records(path: str | Path) -> RecordFile:
    """Every record of a file. Of two with one key the better stays: measured, then the later.

    Raises:
        StoreError: the file is missing, damaged, no file of tuned configs, or holds a YAML tag
            or alias. Nothing that stands in a file is ever run.
    """
    path = Path(path)
    reader = _read(path, "tuned configs")
    content = reader.content
    if not isinstance(content, dict) or not content.keys() <= {"schema", "records"}:
        raise StoreError(
            f"{path}: not a file of tuned configs: it has to hold `schema: {SCHEMA}` and a list "
            "`records:`, and nothing else. `fagen tune --out FILE` writes one"
        )
    items = content.get("records")
    if content.get("schema") != SCHEMA:
        items = []
        reason = f"its schema is {content.get('schema')!r}, this fagen reads {SCHEMA}"
        skipped = [Skipped(1, f"the whole file: {reason}", None)]
    elif not isinstance(items, list):
        raise StoreError(f"{path}: `records:` has to be a list")
    else:
        skipped = []
    records: dict[Any, Record] = {}
    for number, item in enumerate(items):
        try:
            record = _parse(item)
        except (ValidationError, ValueError) as error:
            reason = one_line(error) if isinstance(error, ValidationError) else str(error)
            skipped.append(Skipped(reader.line_of(items, number), reason, item))
        else:
            _keep_better(records, record)
    for entry in skipped:
        _log.info("%s, line %d: record skipped: %s", path, entry.line, entry.reason)
    return RecordFile(path, tuple(sorted(records.values(), key=_order)), tuple(skipped))


def _read(path: Path, kind: str) -> _Reader:
    """What stands in a file of a kind, such as "tuned configs"; see `load_records`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise StoreError(f"{path}: no file of {kind}: it is over {MAX_BYTES >> 20} MiB")
        text = data.decode()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise StoreError(f"{path}: not a text file: {error}. {_WHAT_TO_DO}") from None
    return _Reader(text, path)


def _parse(item: Any) -> Record:
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
    record = Record.model_validate(fields)
    if record.device.arch not in ARCHITECTURES:
        raise ValueError(f"architecture {record.device.arch!r} is unknown")
    return record


def _keep_better(records: dict[Any, Record], record: Record) -> None:
    """File a record under its key, unless a measured one would give way to a prediction."""
    old = records.get(record.key)
    if old is None or record.measured or not old.measured:
        records[record.key] = record


def _order(record: Record) -> tuple[Any, ...]:
    device = (record.device.arch, record.device.key)
    return (_problem_order(record.problem), device, _bucket_order(record.bucket))


def _problem_order(p: Problem) -> tuple[Any, ...]:
    return (p.op, p.dtype, p.head_dim, p.causal, p.alignment)


def _bucket_order(b: Bucket) -> tuple[int, ...]:
    return (b.seqlen_q, b.seqlen_k, b.batch_heads, b.group)


_WHAT_TO_DO = (
    "Nothing of it was used or changed: mend the line, restore the file from git, "
    "or move it away, and the next run writes a new one"
)


class _Reader:
    """YAML text as plain dicts, lists and scalars, with the line that each item of a list is on.

    Twice as fast as yaml's own C loader (a first call waits for it: 28 ms for 200 records), and
    refuses tags and aliases altogether.
    """

    def __init__(self, text: str, path: Path) -> None:
        self._path = path
        self._lines: dict[tuple[int, int], int] = {}  # by list and place in it
        self._scalars: dict[str, Any] = {}  # few are distinct, and typing one is slow
        try:
            loader = _LOADER(text)
            self._next: Callable[[], Any] = loader.get_event
            self._next()  # start of the stream
            if type(self._next()) is yaml.StreamEndEvent:
                self.content: Any = None
                return
            self.content = self._node(self._next(), 0)
            self._next()  # end of the document
            if type(event := self._next()) is not yaml.StreamEndEvent:
                raise self._error(event.start_mark, "a second document starts here")
        except yaml.MarkedYAMLError as error:
            raise self._error(error.problem_mark, str(error.problem)) from None
        except (yaml.YAMLError, ValueError) as error:
            first_line = str(error).partition("\n")[0]
            raise StoreError(f"{path}: not YAML: {first_line}. {_WHAT_TO_DO}") from None

    def line_of(self, items: list[Any], place: int) -> int:
        return self._lines[id(items), place]

    def _error(self, mark: Any, problem: str) -> StoreError:
        line = f", line {mark.line + 1}" if mark else ""
        return StoreError(f"{self._path}{line}: {problem}. {_WHAT_TO_DO}")

    def _node(self, event: Any, depth: int) -> Any:
        kind = type(event)
        if kind is yaml.AliasEvent:
            raise self._error(event.start_mark, f"the alias *{event.anchor} is not allowed")
        if event.tag is not None:
            raise self._error(event.start_mark, f"the tag {event.tag!r} is not allowed")
        if kind is yaml.ScalarEvent:
            return self._scalar(event.value) if event.implicit[0] else event.value
        if depth == MAX_DEPTH:
            raise self._error(event.start_mark, f"nested more than {MAX_DEPTH} deep")
        if kind is yaml.SequenceStartEvent:
            items: list[Any] = []
            while type(event := self._next()) is not yaml.SequenceEndEvent:
                self._lines[id(items), len(items)] = event.start_mark.line + 1
                items.append(self._node(event, depth + 1))
            return items
        mapping: dict[str, Any] = {}
        while type(event := self._next()) is not yaml.MappingEndEvent:
            name = self._node(event, depth + 1)
            if not isinstance(name, str) or name in mapping:
                what = f"{name} is given twice" if isinstance(name, str) else "not a field name"
                raise self._error(event.start_mark, what)
            mapping[name] = self._node(self._next(), depth + 1)
        return mapping

    def _scalar(self, text: str) -> Any:
        if text not in self._scalars:
            self._scalars[text] = yaml.safe_load(text)
        return self._scalars[text]


# ---- writing ----


def save_records(path: str | Path, records: Iterable[Record]) -> None:
    """Merge records into a file, which is created if there is none.

    A record replaces the one with its key, but a predicted one never replaces a measured one.
    What this version cannot read is kept. Safe under concurrent writers (a lock file stays
    beside the file) and kill -9 (the file is replaced as a whole). Comments are not kept.

    Raises:
        StoreError: the file is damaged, of another schema, or cannot be written; it is as it was.
    """
    with _to_change(path) as old:
        merged = {record.key: record for record in old.records}
        for record in records:
            _keep_better(merged, record)
        replace_file(old.path, _text(merged.values(), old.skipped))
    _open.cache_clear()  # this process sees what it saved
    for forget in on_save:
        forget()


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


@contextmanager
def locked(path: str | Path) -> Iterator[Path]:
    """The place of a file, under its lock; an OSError becomes a StoreError."""
    from filelock import FileLock, Timeout

    path = Path(path).expanduser()
    try:
        path = link_target(path)
        if path.exists() and not path.is_file():
            raise StoreError(f"cannot write {path}: it is no file; name another one")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        lock.touch()  # the lock would wait for a place that cannot be written
        with FileLock(lock, timeout=LOCK_SECONDS):
            yield path
    except Timeout:
        raise WriteError(
            f"cannot write {path}: another process has held it for {LOCK_SECONDS:.0f} s ({lock}). "
            "The file is as it was; try again when that has ended, or name another one"
        ) from None
    except OSError as error:
        why = (error.strerror or str(error)).rstrip(".")
        raise WriteError(
            f"cannot write {path}: {why}. The file is as it was; name one that can be written"
        ) from None


_HEADER = """\
# Tuned configs of fagen, written by `fagen tune`; see README.md in tuned_configs of its source.
# To try another config, copy this file, edit the copy, and name it in --config or FAGEN_CONFIG.
"""
_PREDICTED = "# Predicted by the static model, every one: no such card was there to measure on.\n"


def _text(records: Iterable[Record], skipped: Iterable[Skipped]) -> str:
    """The canonical text of a file: one line or two for each part of a record."""
    ordered = sorted(records, key=_order)
    items = [_fields(record) for record in ordered] + [entry.fields for entry in skipped]
    header = _HEADER
    if ordered and not any(record.measured for record in ordered):
        header += _PREDICTED
    return header + _yaml({"schema": SCHEMA, "records": items})


def _yaml(content: dict[str, Any]) -> str:
    # The Python dumper, never the C one: both wrap long lines, but not in the same places.
    text: str = yaml.dump(
        content,
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=90,  # a line ends after the word that passes it
    )
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _fields(record: Record) -> dict[str, Any]:
    """A record as it stands in a file. Every axis is written, to be edited."""
    return {
        "problem": _problem_fields(record.problem),
        "shape": record.shape.model_dump(),
        "device": record.device.model_dump(),
        "config": record.config.model_dump(),
        "axes_version": template_of(record.config).AXES_VERSION,
        "result": record.result.model_dump(exclude_none=True),
        "provenance": record.provenance.model_dump(exclude_none=True),
    }


def _problem_fields(problem: Problem) -> dict[str, Any]:
    """Only what is not the default, so that a problem may grow fields; and what all have."""
    common = problem.model_dump(include={"dtype", "head_dim", "causal"})
    return common | problem.model_dump(exclude_defaults=True)


# ---- recorded calls ----


class Calls(_Part):
    """How often a program called one problem with shapes of one bucket.

    Attributes:
        problem: the static question.
        shape: the lengths that were seen most often.
        calls: how many calls were of the bucket of `shape`.
        shape_calls: how many of them had exactly these lengths.
    """

    problem: Problem
    shape: Shape
    calls: int = Field(ge=1)
    shape_calls: int = Field(ge=1)

    @model_validator(mode="after")
    def _can_be_tuned(self) -> Self:
        if self.shape.flops(self.problem) == 0:
            raise ValueError(f"{self.shape} has nothing to compute: lengths have to be above 0")
        if self.shape_calls > self.calls:
            raise ValueError(f"shape_calls is {self.shape_calls}, more than calls, {self.calls}")
        return self


def load_calls(path: str | Path) -> tuple[Calls, ...]:
    """What `save_calls` wrote, one entry per problem and bucket, in canonical order.

    Raises:
        StoreError: the file is missing, damaged, or no file of recorded calls; as `load_records`,
            but an entry that this version cannot use is an error.
    """
    path = Path(path).expanduser()
    reader = _read(path, "recorded calls")
    content = reader.content
    if (
        not isinstance(content, dict)
        or content.keys() != {"schema", "calls"}
        or content["schema"] != SCHEMA
        or not isinstance(content["calls"], list)
    ):
        raise StoreError(
            f"{path}: not a file of recorded calls: it has to hold `schema: {SCHEMA}` and a list "
            "`calls:`, and nothing else. `with fagen.record(FILE):` writes one"
        )
    entries = []
    for number, item in enumerate(content["calls"]):
        try:
            entries.append(Calls.model_validate(item))
        except ValidationError as error:
            line = reader.line_of(content["calls"], number)
            raise StoreError(f"{path}, line {line}: {one_line(error)}. {_WHAT_TO_DO}") from None
    return _merged(entries)


def save_calls(path: str | Path, calls: Iterable[Calls]) -> None:
    """Add calls to those of a file, which is created if there is none; as safe as `save_records`.

    Raises:
        StoreError: the file is damaged or cannot be written; it is as it was.
    """
    with locked(path) as place:
        old = load_calls(place) if place.exists() else ()
        items = [
            {"problem": _problem_fields(entry.problem)} | entry.model_dump(exclude={"problem"})
            for entry in _merged([*old, *calls])
        ]
        replace_file(place, _CALLS_HEADER + _yaml({"schema": SCHEMA, "calls": items}))


_CALLS_HEADER = """\
# What a program called, written by `fagen.record`; `fagen tune --from FILE` tunes it.
# calls: of this problem with lengths like these; shape_calls: with exactly these.
"""


def _merged(entries: Iterable[Calls]) -> tuple[Calls, ...]:
    """One entry per problem and bucket, with the shape that was seen most often."""
    of_bucket: Counter[tuple[Problem, Bucket]] = Counter()
    of_shape: Counter[tuple[Problem, Shape]] = Counter()
    for entry in entries:
        of_bucket[entry.problem, entry.shape.bucket()] += entry.calls
        of_shape[entry.problem, entry.shape] += entry.shape_calls
    merged: dict[tuple[Problem, Bucket], Calls] = {}
    # By falling count, then by lengths, so that a tie does not depend on the order of entries.
    for (problem, shape), count in sorted(
        of_shape.items(), key=lambda item: (-item[1], str(item[0][1]))
    ):
        key = (problem, shape.bucket())
        if key not in merged:
            merged[key] = Calls(
                problem=problem, shape=shape, calls=of_bucket[key], shape_calls=count
            )
    ordered = sorted(merged, key=lambda key: (_problem_order(key[0]), _bucket_order(key[1])))
    return tuple(merged[key] for key in ordered)


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

    record: Record
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

    def records(self, arch: str | None = None) -> list[Record]:
        """The records of `entries`."""
        return [record for record, _ in self.entries(arch)]

    def _load(self, path: Path) -> RecordFile:
        if path not in self._loaded:
            self._loaded[path] = load_records(path)
        return self._loaded[path]


@cache
def _open(config_file: Path | None) -> Store:
    return Store(config_file)
