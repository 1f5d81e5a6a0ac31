"""From samples to statements: medians, spread, and ratios with an interval.

Rule for maintainers: pure and seeded, so that the same samples always say the
same.  A machine that others use drifts; samples of one round were taken within
seconds of each other, so ratios are resampled round by round (paired).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some samples, their quartiles, and how many there are."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two medians and the interval that holds it with 95% confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{brief(self.value)} [{brief(self.low)}, {brief(self.high)}]"


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles of at least one sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high, len(samples))


def ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Ratio:
    """median(above) / median(below); sample *n* of both is of the same round.

    A system that failed half-way has fewer samples: only common rounds count.
    Raises ValueError when there is no common round.
    """
    rounds = min(len(above), len(below))
    if not rounds:
        raise ValueError("a ratio needs at least one round that both systems finished")
    first, second = above[:rounds], below[:rounds]
    chance = random.Random(seed)
    drawn = []
    for _ in range(RESAMPLES):
        pick = chance.choices(range(rounds), k=rounds)
        top = statistics.median(first[n] for n in pick)
        drawn.append(top / statistics.median(second[n] for n in pick))
    drawn.sort()
    edge = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    value = statistics.median(first) / statistics.median(second)
    return Ratio(value, drawn[edge], drawn[-1 - edge])


def brief(number: float) -> str:
    """Three significant digits, no exponent: 0.0123, 1.23, 12.3, 1 230."""
    if number == 0:
        return "0"
    rounded = float(f"{number:.3g}")
    if abs(rounded) >= 1000:
        return f"{rounded:,.0f}".replace(",", " ")
    return f"{number:#.3g}".rstrip(".")


def seconds(value: float) -> str:
    """A duration with the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if float(f"{value * scale:.3g}") >= 1:
            return f"{brief(value * scale)} {unit}"
    return f"{brief(value * 1e9)} ns"
