"""The legal set: every legal config of a template for a problem, as numbers that a search walks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from fagen.device import Device
from fagen.errors import ArgumentError
from fagen.kernels import space
from fagen.kernels.registry import TEMPLATES, default_config, native_template
from fagen.kernels.template import Config
from fagen.problem import Problem


class LegalSet:
    """Every legal config of a template for a problem, enumerated once, as numbers.

    Attributes:
        problem, device, template: what it is the set of.
        default: the template's default, which `fixed` may exclude.
        axes: the values of each axis.
        points: how many configs they span.
        removed: how many of these each rule removes, by the rule's name.
        positions: (configs, axes) int8, each config as its place on each axis.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        template: str,
        *,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        self.problem, self.device, self.template = problem, device, template
        self.default = default_config(problem, device, template)
        self.axes = space.axes(template, problem, fixed)
        places = [
            (axis, {value: place for place, value in enumerate(values)})
            for axis, values in self.axes.items()
        ]
        self.points = math.prod(map(len, self.axes.values()))
        # Only the axes that a rule reads are walked; the values of the others are multiplied in.
        free = space.free_axes(template)
        held = {axis: self.axes[axis][0] for axis in free}
        removed: Counter[str] = Counter()
        rows = [
            [place[getattr(config, axis)] for axis, place in places]
            for config in space.legal_configs(
                template, problem, device, fixed={**(fixed or {}), **held}, rejections=removed
            )
        ]
        variants = np.indices([len(self.axes[axis]) for axis in free]).reshape(len(free), -1).T
        self.removed = Counter({rule: count * len(variants) for rule, count in removed.items()})
        walked = np.array(rows, dtype=np.int8).reshape(len(rows), len(self.axes))
        positions = np.repeat(walked, len(variants), axis=0)
        columns = [list(self.axes).index(axis) for axis in free]
        positions[:, columns] = np.tile(variants, (len(walked), 1))
        sizes = [len(values) for values in self.axes.values()]
        self._weights = np.cumprod([1, *sizes[:0:-1]], dtype=np.int64)[::-1]
        codes = positions @ self._weights
        order = np.argsort(codes)
        self.positions, self._codes = positions[order], codes[order]
        if not rows:
            asked = [f"{axis}={','.join(map(str, self.axes[axis]))}" for axis in fixed or ()]
            raise ArgumentError(
                f"{problem} has no legal config of {template} with "
                f"{' '.join(asked) or 'any values'} on {device}: allow more values of an axis"
            )

    @classmethod
    def of(
        cls,
        problem: Problem,
        device: Device,
        template: str | None,
        *,
        fixed: Mapping[str, Any] | None = None,
    ) -> Self:
        """The legal set of a template; of the native one that fits, if None."""
        template = template or native_template(problem, device.arch).NAME
        return cls(problem, device, template, fixed=fixed)

    def __len__(self) -> int:
        return len(self.positions)

    def config(self, row: int) -> Config:
        """The config of a row of `positions`."""
        return TEMPLATES[self.template].Config(**self.parameters(row))

    def parameters(self, row: int) -> dict[str, Any]:
        """The value of each axis in a row of `positions`."""
        places = self.positions[row]
        return {
            axis: values[place]
            for (axis, values), place in zip(self.axes.items(), places, strict=True)
        }

    def place(self, values: dict[str, Any]) -> np.ndarray | None:
        """The place of each value on its axis, or None if one is not on it."""
        try:
            return np.array([self.axes[axis].index(values[axis]) for axis in self.axes])
        except ValueError:
            return None

    def find(self, values: dict[str, Any]) -> int | None:
        """The row of a config given by its axes, or None if it is not in the set."""
        place = self.place(values)
        if place is None:
            return None
        code = place @ self._weights
        row = int(np.searchsorted(self._codes, code))
        return row if row < len(self) and self._codes[row] == code else None

    def nearest(self, place: np.ndarray, taken: np.ndarray, rng: np.random.Generator) -> int:
        """A row that is not taken, the fewest steps along the axes away; ties fall at random."""
        distance = np.abs(self.positions - place.astype(np.int8)).sum(axis=1, dtype=np.int16)
        distance[taken] = np.iinfo(np.int16).max
        return int(rng.choice(np.flatnonzero(distance == distance.min())))
