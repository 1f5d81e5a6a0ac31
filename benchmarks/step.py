"""Training steps of real models, beside plain JAX in one process.

    python -m benchmarks.step [--models "GPT, 2 layers" "MLP, 4 layers"] [--devices 1 4]

A step is forward, backward and update with optax's adamw, as one function that overwrites its
state: language models of 2, 4 and 12 layers, a multilayer perceptron and a convolutional network,
on one device and on four of one host (:mod:`benchmarks.gangs.models`), and on as many of two hosts
(``--hosts 2``), where the peer is multi-controller JAX.  First losses are those of plain JAX on one
device, or the system is left out.  The systems take turns, and those whose turn it is not are
stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.gangs.models import MODELS, WIDE, arrays, first_losses
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.report import Report, publish
from benchmarks.harness.rounds import measure

JAX, LAB, DOOR = "JAX, one process", "lab", "JAX through the door"
SYSTEMS = {JAX: "jax", LAB: "lab", DOOR: "door"}
CONTROLLERS = "JAX, multi-controller"
APART = {CONTROLLERS: "controllers", LAB: "lab"}
"""On several hosts."""


def main(argv: Sequence[str] | None = None) -> None:
    """One table for each number of devices."""
    parser = arguments(__doc__, rounds=9, budget=0.5)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=(*MODELS, WIDE))
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    chosen = parser.parse_args(argv)
    how = settings(chosen)
    cases = [MODELS[-1]] if how.quick else chosen.models
    expected = {case: first_losses(case) for case in cases}
    notes = [f"Arrays of its state: {', '.join(f'{case}: {arrays(case)}' for case in cases)}."]
    for hosts, devices in itertools.product(chosen.hosts, chosen.devices):
        if devices % hosts:
            continue
        apart: dict[str, Any] = {"hosts": hosts} if hosts > 1 else {}
        named = APART if apart else {name: SYSTEMS[name] for name in chosen.systems}
        systems = [
            Child(
                name, "benchmarks.gangs.models", cases,
                system=system, devices=devices, expected=expected, **apart,
            )
            for name, system in named.items()
        ]  # fmt: skip
        measured = measure(systems, cases, rounds=how.rounds, budget=how.budget, seed=how.seed)
        where = f"{hosts} hosts" if apart else "one host"
        title = f"training steps, {devices} device{'s' * (devices > 1)} of {where}"
        name = f"step-{devices}" + f"-hosts-{hosts}" * bool(apart)
        peer = next(iter(named))
        publish(Report(name, title, "step", measured, peer, notes=notes), how.folder)


if __name__ == "__main__":
    main()
