"""``pw.search`` on models that it has not seen: the best way beside the default, and predictions.

    python -m benchmarks.search [--seconds 25]

Five models, whose parts hold their devices for some milliseconds of each example (emulated): equal
parts, uneven ones, a pyramid, skips over the middle, two towers and a head.  Each is searched over
schedules, microbatches and cuts, on slices of two islands.  A search runs a few ways to calibrate
itself, predicts all others, and runs the best predicted ones; only those count here, which were
predicted before they were run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathways_lab as pw
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import Measured

WIDTH, EXAMPLES = 8, 32
DEFAULT, FOUND = "default", "found"
Layer = Callable[[Any, Any], Any]


def dense(w: Any, x: Any) -> Any:
    """The arithmetic of each part."""
    return jnp.tanh(x @ w)


@dataclass(frozen=True)
class Model:
    """milliseconds: by part, of an example forward.  compute(parts, weights, x): of its parts."""

    name: str
    milliseconds: Sequence[float]
    compute: Callable[[Sequence[Layer], Any, Any], Any]
    cut: Sequence[int]
    """By part, its slice by default."""

    @property
    def parts(self) -> list[str]:
        """Their names."""
        return [f"p{number}" for number in range(len(self.milliseconds))]

    def step(self, slices: Sequence[pw.Slice]) -> Any:
        """A training step of it, and its arguments."""
        layers = [
            pw.mpmd.named(part, pw.pipeline.held(dense, forward=milliseconds))  # type: ignore[attr-defined]
            for part, milliseconds in zip(self.parts, self.milliseconds, strict=True)
        ]

        def loss(weights: Any, x: Any, y: Any) -> Any:
            return jnp.mean((self.compute(layers, weights, x) - y) ** 2)

        def train_step(weights: Any, x: Any, y: Any, microbatches: int = 4) -> Any:
            rows = [a.reshape(microbatches, -1, a.shape[-1]) for a in (x, y)]

            def turn(total: Any, row: Any) -> Any:
                value, slopes = jax.value_and_grad(loss)(weights, *row)
                return jax.tree.map(jnp.add, total, (value, slopes)), None

            zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
            (value, slopes), _ = jax.lax.scan(turn, zero, rows)
            return jax.tree.map(lambda w, d: w - 0.1 * d / microbatches, weights, slopes), value

        on = {part: slices[at] for part, at in zip(self.parts, self.cut, strict=True)}
        rng = np.random.default_rng(0)
        weights = [rng.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for _ in self.parts]
        x, y = rng.normal(size=(2, EXAMPLES, WIDTH)).astype(np.float32)
        step = pw.mpmd.jit(train_step, on=on, schedule="gpipe")
        return step, step.place(weights, x, y)


def chain(parts: Sequence[Layer], weights: Any, x: Any) -> Any:
    """One after the other."""
    for part, own in zip(parts, weights, strict=True):
        x = part(own, x)
    return x


def skips(parts: Sequence[Layer], weights: Any, x: Any) -> Any:
    """The first ones' results go to the last ones too."""
    kept: list[Any] = []
    half = len(parts) // 2
    for number, (part, own) in enumerate(zip(parts, weights, strict=True)):
        x = part(own, x + kept.pop() if number >= half else x)
        if number < half:
            kept.append(x)
    return x


def towers(parts: Sequence[Layer], weights: Any, x: Any) -> Any:
    """Two towers of half of the parts each, and the last part on both."""
    half = (len(parts) - 1) // 2
    left = chain(parts[:half], weights[:half], x)
    right = chain(parts[half:-1], weights[half:-1], x[:, ::-1])
    return parts[-1](weights[-1], left * right)


MODELS = (
    Model("equal parts", [0.5] * 8, chain, [0, 0, 0, 1, 1, 1, 2, 2]),
    Model(
        "uneven parts", [1.2, 0.3, 0.3, 0.3, 0.9, 0.3, 0.3, 0.6], chain, [0, 0, 0, 1, 1, 1, 2, 2]
    ),
    Model("a pyramid", [1.6, 1.0, 0.6, 0.4, 0.3, 0.2], chain, [0, 0, 1, 1, 2, 2]),
    Model("skips", [0.4, 0.6, 0.8, 0.8, 0.6, 0.4], skips, [0, 0, 1, 1, 2, 2]),
    Model("towers", [0.6, 0.4, 0.8, 0.5, 0.5, 0.5, 0.6], towers, [0, 0, 0, 1, 1, 1, 2]),
)


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=1, budget=1.0)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each search")
    chosen = parser.parse_args()
    how, measured, notes = settings(chosen), Measured(), [""]
    models = MODELS[:1] if how.quick else MODELS
    for model in models:
        with pw.start(islands=2, hosts_per_island=2, devices_per_host=1, progress=False) as lab:
            slices = [lab.slice(1, island=name) for name in ("island0", "island0", "island1")]
            step, args = model.step(slices)
            jax.block_until_ready(step(*args))
            found = pw.search(
                step, lab, over=("schedule", "microbatches", "cut"), seconds=chosen.seconds
            )
        print(f"{model.name}\n{found!r}\n", file=sys.stderr, flush=True)
        measured.times[model.name] = {DEFAULT: found.default.times, FOUND: found.winner.times}
        off = [c.error for c in found.candidates if c.error is not None and not c.calibrated]
        told = ", ".join(f"{error:+.1%}" for error in off) or "none was run"
        least = statistics.median(map(abs, off)) if off else 0.0
        notes.append(
            f"{model.name}: the best way is {found.winner.way}; predicted against measured:"
            f" {told}; half of them within {least:.1%}."
        )
    title = "pw.search on models that it has not seen (emulated)"
    publish(Report("search", title, "step", measured, DEFAULT, notes=notes), how.folder)


if __name__ == "__main__":
    main()
