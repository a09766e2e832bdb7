"""problem, shape, device -> config, by six tiers, and never silently.

1. the config that the caller gives;
2. measured for this device and bucket, the user's own records before the shipped ones;
3. measured for this device, nearest bucket;
4. measured on another device of this architecture;
5. predicted by the static model, as `fagen tune` stores it where there is no device;
6. the template's default, which is always legal.

What is illegal here (another card has more shared memory, an edited file a wrong tile) is passed
over, and the choice says so. Only buckets count, not lengths: all calls of one bucket get one
kernel, whichever comes first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from fagen.build.render import render
from fagen.device import Device
from fagen.kernels.registry import default_config
from fagen.kernels.space import require_legal, why_illegal
from fagen.kernels.template import Config
from fagen.problem import WIDE_ALIGNMENT, Bucket, Problem, Shape
from fagen.records.store import Entry, Store, TunedConfig, digest

STALE = "not the text that was tuned: its config was edited, or the template is another"

_log = logging.getLogger(__name__)


class Tier(IntEnum):
    """Where a config comes from; a lower number goes first."""

    GIVEN = 1
    MEASURED_HERE = 2
    MEASURED_NEAR = 3
    MEASURED_ELSEWHERE = 4
    PREDICTED = 5
    DEFAULT = 6

    def title(self, arch: str) -> str:
        """The tier in words."""
        return (
            "given",
            "measured for this device",
            "measured for this device, nearest bucket",
            f"measured on another {arch} device",
            "predicted",
            "default",
        )[self - 1]


@dataclass(frozen=True)
class Choice:
    """The config of a call, and why it is that one.

    Attributes:
        problem, device: what was asked.
        config: the answer.
        tier: where it comes from.
        reason: one sentence.
        record, path: the record that it comes from and its file; None in the first and last tier.
    """

    problem: Problem
    device: Device
    config: Config
    tier: Tier
    reason: str
    record: TunedConfig | None = None
    path: Path | None = None

    @property
    def tier_name(self) -> str:
        """The tier in words, such as "predicted"."""
        return self.tier.title(self.device.arch.name)

    @property
    def stale(self) -> bool:
        """Whether the record was tuned on another text than the config gives now (renders it)."""
        return self.record is not None and is_stale(self.record)

    def describe(self) -> str:
        """A few lines for people: problem, device, config, tier, reason and provenance."""
        lines = {
            "problem": str(self.problem),
            "device": str(self.device),
            "config": str(self.config),
            "tier": f"{self.tier:d} of {len(Tier)}, {self.tier_name}",
            "because": self.reason,
        }
        if self.problem.alignment < WIDE_ALIGNMENT:
            lines["loads"] = f"narrow: a base or stride is no multiple of {WIDE_ALIGNMENT} bytes"
        if self.record:
            made = self.record.provenance
            lines["record"] = f"{made.date}, fagen {made.fagen}, NVRTC {made.nvrtc}"
            lines["file"] = str(self.path)
        if self.stale:
            lines["note"] = f"{STALE}: `fagen tune` measures it anew"
        return "\n".join(f"{name:8} {text}" for name, text in lines.items())


class Offer(NamedTuple):
    """A config that a tier has for a call.

    Attributes:
        tier: the tier.
        config: the config.
        entry: its record and file; None for the default.
        illegal: the rule that it breaks here, or None.
    """

    tier: Tier
    config: Config
    entry: Entry | None = None
    illegal: str | None = None


def choose(
    problem: Problem,
    shape: Shape,
    device: Device,
    *,
    config: Config | None = None,
    store: Store | None = None,
) -> Choice:
    """The config of a call, by the tiers above; what is asked again comes from a cache.

    Args:
        config: the caller's own.
        store: `Store.open()` if None.

    Raises:
        ConfigError: `config` is illegal here; the message is the broken rule.
        StoreError: a file of records is damaged.
    """
    if config is not None:
        require_legal(config, problem, device)
        return Choice(problem, device, config, Tier.GIVEN, "The caller gave this config.")
    return _choose(problem, shape.bucket(), device, store or Store.open())


def tier_table(
    problem: Problem, shape: Shape, device: Device, *, store: Store | None = None
) -> dict[Tier, list[Offer]]:
    """What each stored tier (2 to 6) has for a call, best first, illegal offers included."""
    table: dict[Tier, list[Offer]] = {tier: [] for tier in Tier if tier != Tier.GIVEN}
    for offer in _offers(problem, shape.bucket(), device, store or Store.open()):
        table[offer.tier].append(offer)
    return table


@cache
def is_stale(record: TunedConfig) -> bool:
    """Whether the record's config renders to another text today than when it was tuned."""
    return digest(render(record.problem, record.config)) != record.provenance.text


@lru_cache(maxsize=4096)
def _choose(problem: Problem, bucket: Bucket, device: Device, store: Store) -> Choice:
    offers = _offers(problem, bucket, device, store)
    legal = [offer for offer in offers if offer.illegal is None]
    best = _fresher(legal)
    reason = _reason(best, bucket, device)
    passed_over = [offer.illegal for offer in offers[: offers.index(best)] if offer.illegal]
    if passed_over:
        reason += f" Illegal here and passed over: {'; '.join(dict.fromkeys(passed_over))}."
    if store.config_file and (skipped := store.files()[0].skipped):
        line, why, _ = skipped[0]
        reason += f" {len(skipped)} records of {store.config_file.name} are unusable: "
        reason += f"line {line}: {why}."
    record, path = best.entry or (None, None)
    choice = Choice(problem, device, best.config, best.tier, reason, record, path)
    _log.info(
        "%s %s on %s: %s (%s). %s",
        problem,
        bucket,
        device,
        best.config,
        choice.tier_name,
        reason,
    )
    return choice


def _offers(problem: Problem, bucket: Bucket, device: Device, store: Store) -> list[Offer]:
    """Every offer of tiers 2 to 6, the best first, as if all were fresh."""
    entries = store.entries(device.arch.name, problem)
    # Stable: among equals, those of the user's own file and then the file's order count.
    entries.sort(key=lambda entry: _rank(entry.record, bucket, device))
    offers = [
        Offer(
            _tier(record, bucket, device),
            record.config,
            Entry(record, path),
            why_illegal(record.config, problem, device),
        )
        for record, path in entries
    ]
    return [*offers, Offer(Tier.DEFAULT, default_config(problem, device))]


def _tier(record: TunedConfig, bucket: Bucket, device: Device) -> Tier:
    if not record.measured:
        return Tier.PREDICTED
    if record.device.key != device.key:
        return Tier.MEASURED_ELSEWHERE
    return Tier.MEASURED_HERE if record.bucket == bucket else Tier.MEASURED_NEAR


def _rank(record: TunedConfig, bucket: Bucket, device: Device) -> tuple[float, ...]:
    """What orders offers: the tier, this device, the nearest bucket, the most similar device."""
    return (
        _tier(record, bucket, device),
        record.device.key != device.key,
        bucket.distance(record.bucket),
        abs(record.device.sm_count - device.sm_count),
    )


def _fresher(offers: Sequence[Offer]) -> Offer:
    """The first offer, or the other file's record of the same key if only the first is stale.

    Nothing is rendered unless the two differ: a call that finds its cubin in the cache has to
    load no Jinja2.
    """
    first = offers[0]
    for rival in offers[1:]:
        if (
            first.entry
            and rival.entry
            and (rival.tier, rival.entry.record.key) == (first.tier, first.entry.record.key)
            and rival.config != first.config
            and is_stale(first.entry.record)
            and not is_stale(rival.entry.record)
        ):
            return rival
    return first


def _reason(offer: Offer, bucket: Bucket, device: Device) -> str:
    """Why an offer won, as one sentence."""
    arch = device.arch.name
    if offer.entry is None:
        return f"No record of this problem on {arch} applies: `fagen tune --arch {arch}` makes one."
    record, path = offer.entry
    result = record.result
    speed = f"{result.median_us:g} us, {result.tflops:g} TFLOP/s"
    if record.bucket != bucket:
        speed += f" in bucket {record.bucket}, the nearest to {bucket}"
    if offer.tier == Tier.PREDICTED:
        where = "" if record.device.key == device.key else f" for {record.device}"
        return f"Nothing is measured; the static model expects {speed}{where} ({path.name})."
    trials = f"best of {result.trials} trials"
    where = "this device" if record.device.key == device.key else str(record.device)
    return f"Measured on {where}, {trials}: {speed} ({path.name})."
