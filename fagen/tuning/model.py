"""problem, shape, config, device -> microseconds, predicted without running anything.

A template's `cost` counts the cycles of its kernels (`fagen.kernels.cost`); here they become time,
and share it with device memory. What counts is the order of the configs, not the microsecond.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fagen.device import Device
from fagen.kernels.registry import template_of
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.build.compiled import Resources

SUSTAINED_CLOCK = 0.95  # of the boost clock, in measurements with pauses between the launches
LAUNCH_US = 2.0


def memory_us(problem: Problem, shape: Shape, device: Device) -> float:
    """Moving each operand once between device memory and the chip, in microseconds."""
    return shape.bytes(problem) / device.memory_gbps * 1e-3


def predict(
    problem: Problem,
    shape: Shape,
    config: Config,
    device: Device,
    resources: Resources | None = None,
) -> float:
    """The predicted time of a config in microseconds.

    Args:
        resources: what the compiler reported, if it was asked.
    """
    cost = template_of(config).cost(problem, shape, config, device, resources)
    if cost.cycles == 0:
        return LAUNCH_US
    p = cost.memory_norm
    computing = math.pow(cost.cycles / (SUSTAINED_CLOCK * device.clock_mhz), p)
    memory = math.pow(memory_us(problem, shape, device), p)
    return LAUNCH_US + math.pow(computing + memory, 1 / p)
