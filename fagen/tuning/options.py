"""What a tuning may be told, beside its tasks: names, meanings, defaults and bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from fagen.device import Architecture
from fagen.errors import ArgumentError
from fagen.validation import as_argument_error

Effort = Literal["quick", "full"]
Sampler = Literal["surrogate", "tpe", "random", "brute-force", "gp", "nsga2", "qmc"]

SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
TRIALS: dict[Effort, int] = {"quick": 60, "full": 100}
ASKS_PER_TRIAL = 5  # candidates that may fall to the static filter for each one that is timed

Function = TypeVar("Function", bound=Callable[..., Any])


class TuneOptions(BaseModel):
    """Options of a tuning. Those about trials and studies mean nothing for a prediction.

    Attributes:
        arch: the architecture to tune for; that of the device if None. Where the first of
            `devices` is another one, or there is none, records are predicted.
        devices: the GPUs to measure on, as CUDA counts: equal ones, which share the candidates.
        template: the template to search; the architecture's native one that fits, if None.
        fixed: axes held at one value, or at the values of a tuple.
        effort: "full" times each candidate on a ragged shape, too, beside each shape of a task;
            "quick" does not, and tries fewer.
        trials: configs per shape that reach the GPU, those of resumed runs included; 100 for the
            full effort and 60 for the quick one if None.
        budget_s: seconds for all tasks together; each gets its share.
        sampler: what chooses the configs: "surrogate" is the static model, corrected as times
            arrive; "random" and "brute-force" walk the space; the others are Optuna's.
        seed: makes a sampler repeat itself.
        storage: a database URL or a journal file of studies; a journal of the card if None.
        resume: go on with the studies of an earlier run.
        out: the YAML file to write; the user's own records if None.
        processes: how many compile at once; one per available CPU but one, if None.
        compile_only: measure nothing and save no record: compile the likely candidates for
            `arch`, for those that tune with the same FAGEN_CACHE.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: Architecture | None = None
    devices: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    template: str | None = None
    fixed: dict[str, Any] | None = None
    effort: Effort = "full"
    trials: int | None = Field(default=None, gt=0)
    budget_s: float | None = Field(default=None, gt=0)
    sampler: Sampler = "surrogate"
    seed: int = Field(default=0, ge=0)
    storage: str | Path | None = None
    resume: bool = False
    out: str | Path | None = None
    processes: int | None = Field(default=None, gt=0)
    compile_only: bool = False

    @classmethod
    def of(cls, **options: Any) -> Self:
        """The options of these names.

        Raises:
            ArgumentError: in one line, for an unknown name or a value that is not allowed.
        """
        for name in options.keys() - cls.model_fields.keys():
            raise ArgumentError(f"no option {name}: there are {', '.join(cls.model_fields)}")
        with as_argument_error():
            return cls(**options)

    @property
    def trials_per_shape(self) -> int:
        """How many trials there are, whether or not a number was given."""
        return self.trials or TRIALS[self.effort]


def takes_tune_options(function: Function) -> Function:
    """Lists the options in the signature of a function whose `**options` they are."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {parameter.name for parameter in own}
    listed = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation
        )
        for name, field in TuneOptions.model_fields.items()
        if name not in names
    ]
    function.__signature__ = signature.replace(parameters=own + listed)  # type: ignore[attr-defined]
    return function
