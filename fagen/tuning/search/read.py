"""Reads kept studies back: their trials, and the question that each of them answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from fagen.device import KNOWN_DEVICES, Device
from fagen.errors import ArgumentError, StoreError
from fagen.kernels.registry import parse_config
from fagen.problem import Bucket, Problem, Shape
from fagen.tuning.outcome import Measured, Outcome, Rejected, Trial
from fagen.tuning.search import first_format
from fagen.tuning.search.storage import close_storage, open_storage, without_password

CLAIM = "claim"  # the kind of a trial that only says who evaluates a config


@dataclass(frozen=True)
class KeptStudy:
    """A study as its storage holds it.

    Attributes:
        name: that of the study.
        about: the JSON values that were kept beside the trials.
        trials: in order, the sampler's asks for illegal configs among them, but no time that was
            withdrawn.
        unreadable: how many trials are not of this version.
    """

    name: str
    about: Mapping[str, Any]
    trials: tuple[Trial, ...]
    unreadable: int


@dataclass(frozen=True)
class Subject:
    """The question that a study answers.

    Attributes:
        problem, bucket, template: what is tuned.
        shape: where its times were taken; None if that was not kept.
        card: `Device.key` of the GPU.
        device: that GPU; None if fagen does not know its limits.
    """

    problem: Problem
    bucket: Bucket
    template: str
    shape: Shape | None
    card: str
    device: Device | None


def subject_of(study: KeptStudy) -> Subject | None:
    """What a kept study is about, or None if `fagen tune` did not make it."""
    notes = complete_notes(study.name, study.about)
    try:
        problem, template = Problem.model_validate(notes["problem"]), str(notes["template"])
        shape = Shape.model_validate(notes["shape"]) if notes.get("shape") else None
        bucket = shape.bucket() if shape else Bucket.model_validate(notes["bucket"])
        device = Device.model_validate(notes["device"]) if "device" in notes else None
        card = device.key if device else str(notes["card"])
    except (KeyError, ValidationError):
        return None
    if device is None:
        device = next((known for known in KNOWN_DEVICES.values() if known.key == card), None)
    return Subject(problem, bucket, template, shape, card, device)


def complete_notes(name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept beside the trials; of the first format, also what the name says."""
    named = {} if "problem" in about else first_format.notes_of_name(name)
    notes = named | dict(about)
    with suppress(KeyError, ValidationError):  # as this version describes the same device
        notes["device"] = Device.model_validate(notes["device"]).model_dump()
    return notes


def outcome_of(trial: FrozenTrial) -> Outcome:
    """What a finished trial says."""
    fields = {k: v for k, v in trial.user_attrs.items() if k not in ("config", "owner")}
    if trial.state == TrialState.COMPLETE:
        return Measured(**{key: value for key, value in fields.items() if key != "kind"})
    return Rejected(**fields)


def read_studies(where: str | Path, wanted: Sequence[str] = ()) -> list[KeptStudy]:
    """The studies of a storage, in the order that they were started.

    Args:
        where: as for `open_storage`, but it has to exist.
        wanted: names; one that no study has stands for all that contain it. Empty: every study.

    Raises:
        ArgumentError: where there is no storage, or no such study.
        StoreError: as `open_storage`, or if the database goes away.
    """
    file, shown = str(where), without_password(where)
    if file.startswith("sqlite:///"):  # which would be made
        file = file.removeprefix("sqlite:///").partition("?")[0]
    if "://" not in file and not Path(file).expanduser().is_file():
        raise ArgumentError(f"{shown}: no such storage; `fagen tune --storage` writes one")
    storage = open_storage(where)
    try:
        names = optuna.get_all_study_names(storage)
        chosen = set() if wanted else set(names)
        for part in wanted:
            found = {part} & set(names) or {name for name in names if part in name}
            if not found:
                raise ArgumentError(
                    f"{shown} has no study {part!r}: it has {', '.join(map(repr, names)) or 'none'}"
                )
            chosen |= found
        return [_read_study(name, storage) for name in names if name in chosen]
    except StorageInternalError as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise StoreError(f"cannot read the studies of the database: {why}") from None
    finally:
        close_storage(storage)


def _read_study(name: str, storage: BaseStorage) -> KeptStudy:
    study = optuna.load_study(study_name=name, storage=storage)
    finished = [
        _read_trial(trial)
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and trial.user_attrs.get("kind") != CLAIM
    ]
    trials = [trial for trial in finished if trial is not None]
    # A time may have been withdrawn later.
    rejected = {trial.config: i for i, trial in enumerate(trials) if _is_verdict(trial.outcome)}
    standing = tuple(
        trial
        for i, trial in enumerate(trials)
        if isinstance(trial.outcome, Rejected) or rejected.get(trial.config, -1) < i
    )
    return KeptStudy(name, study.user_attrs, standing, len(finished) - len(trials))


def _is_verdict(outcome: Outcome) -> bool:
    """Whether it is a rejection, and not of an ask that led nowhere."""
    return isinstance(outcome, Rejected) and outcome.kind != "illegal"


def _read_trial(trial: FrozenTrial) -> Trial | None:
    """What a trial tells, or None if a version of fagen kept it whose configs were others."""
    kept = trial.user_attrs.get("config")
    if not isinstance(kept, dict):
        kept = {"template": first_format.template_of(str(kept)), **trial.params}
    try:
        return Trial(parse_config(kept), outcome_of(trial), trial.datetime_complete)
    except (ArgumentError, ValidationError):
        return None
