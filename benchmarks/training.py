"""The paper's trainings in ratios: pipelines, islands, and one controller against many.

    python -m benchmarks.training [--milliseconds 32] [--factor 1] [--emulated]

Paper, section 5.3: Table 2 (pipelines against SPMD at equal batch, M = 4S), Figure 10
(four islands against one), Figure 12 (two islands against one of twice the size) and
Table 1 (one controller against many).  All but the last on emulated devices, whose
ratios are worth what their constants are worth: ``--factor`` varies these
(:mod:`benchmarks.gangs.trainings`), ``--milliseconds`` the time of a layer.  The same
programs are then **simulated** at the paper's size, on hosts that share no processor.
Table 1 is real computation: three sizes of a language model, because a step of a few
milliseconds leaves nothing behind which the controller's own work could be hidden.  No
constant fixes it; ``--emulated`` leaves it out.

How long a layer takes follows from Table 2, whose S=16, M=64 trains 131.4k tokens/s on 128
cores.  A batch is of a million tokens, in examples of 2,048, as GPT-3's model of that size had
(arXiv 2005.14165, Table 2.1; the paper does not say): one example of a microbatch for each of
the 8 cores of a stage.  Forward and backward of a microbatch of T tokens take a stage,
together, T M / (131.4k (M + S - 1)) = 101 ms, a third of it forward, and without what is for
collectives 32 ms, here for one of 16 layers and one example.

What pipelines would take were there nothing else is printed beside what they took: the
difference is the lab's own, whatever the constants.  Three rounds take some ten minutes,
and Table 1 twelve more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gangs.trainings import (
    ALL,
    APART,
    BANDWIDTH,
    CORES,
    DEVICES,
    EIGHT,
    FEW,
    LATENCY,
    OVERLAP,
    SPMD,
    STAGE,
    STAGES,
    TOGETHER,
    WIDTH,
    Training,
)
from benchmarks.harness.child import Child
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.numbers import seconds, spread
from benchmarks.harness.report import Claim, Report, judged, markdown, publish, verdict_table
from benchmarks.harness.rounds import Measured, Timed, measure

ONE, FOUR = "one island of 16", "four islands of 4"
TINY, SMALL, LARGER = (
    f"{size} language model, really computed" for size in ("tiny", "small", "larger")
)
MODELS = {
    TINY: {"blocks": 2, "width": 64, "hidden": 256, "heads": 4, "context": 32},
    SMALL: {"blocks": 4, "width": 128, "hidden": 512, "heads": 4, "context": 64},
    LARGER: {"blocks": 6, "width": 256, "hidden": 1024, "heads": 4, "context": 64},
}
JAX, OURS = "multi-controller", "spmd"
STEPS = 10

CLAIMS = (
    Claim("GPipe S=4 as fast as SPMD", (ALL, ONE), (STAGES[4], ONE), 1.0),
    Claim("GPipe S=8 as fast as SPMD", (ALL, ONE), (STAGES[8], ONE), 1.0),
    Claim("GPipe S=16 as fast as SPMD", (ALL, ONE), (STAGES[16], ONE), 1.0),
    Claim("S=16 loses at most 1.7% of S=4", (STAGES[4], ONE), (STAGES[16], ONE), 0.983),
    Claim("four times the devices, S=4", (FEW, ONE), (STAGES[4], ONE), 3.86),
    Claim("Figure 10: four islands against one", (FEW, ONE), (FEW, FOUR), 0.99),
    Claim("Figure 12: two islands against one", (EIGHT, ONE), (EIGHT, FOUR), 0.97),
    Claim("Figure 12, overlapped", (EIGHT, ONE), (OVERLAP, FOUR), 0.97),
    Claim("overlapped against not", (EIGHT, FOUR), (OVERLAP, FOUR), 1.0),
    Claim("Table 1, larger: ours against multi-controller", (LARGER, JAX), (LARGER, OURS), 0.98),
    Claim("Table 1, small: ours against multi-controller", (SMALL, JAX), (SMALL, OURS), 0.98),
    Claim("Table 1, tiny: ours against multi-controller", (TINY, JAX), (TINY, OURS), 0.98),
)


class Way:
    """One way to train the language models, made ready anew in every round."""

    cases: Sequence[str] = tuple(MODELS)

    def __init__(self, lab: Any, name: str) -> None:
        from pathways_lab.pipeline import ways

        self.name = name
        self._lab, self._ready = lab, ways.ready
        self._work = {case: work(**size) for case, size in MODELS.items()}

    def start(self) -> None:
        """Its lab is there."""

    def round(self, case: str, units: int) -> Timed:
        """At least so many steps, in whole lengths of a loop."""
        import jax

        times = -(-units // STEPS)
        with self._ready(self._lab, self.name, self._work[case], "island0") as prepared:
            # The first loop of each length is compiled.
            for count in (prepared.warm, STEPS):
                jax.block_until_ready(prepared.go(count))
            begun = time.perf_counter()
            for _ in range(times):
                jax.block_until_ready(prepared.go(STEPS))
            seconds = time.perf_counter() - begun
        return Timed(seconds, times * STEPS)

    def stop(self) -> None:
        """Its lab ends later."""


def work(**size: int) -> Any:
    """Steps of a language model on 16 examples."""
    import optax

    from pathways_lab.pipeline import ways
    from pathways_lab.workloads import language

    model = language.Size(**size)
    layers = list(zip(language.functions(model), language.parameters(model), strict=True))
    batch = next(language.batches(model, examples=16))
    return ways.Work(layers, language.loss, optax.sgd(0.1), batch, STEPS)


# --- simulated at the paper's size -----------------------------------------------------------

ALL_CORES = 128
"""Of the paper's configuration B, with hosts of :data:`CORES`."""

HALVES, OVERLAPPED = "two islands of 64", "two islands of 64, overlapped"
FOUR_ISLANDS, MORE = "GPipe S=16 on four islands of 32", "GPipe S=16 on 512"


def simulated(forward: float, factor: float) -> dict[str, float]:
    """Simulated seconds of a step on 128 cores (or as the name says), by case.

    A microbatch of S=16 has one example for each core of a stage, as in the real run.
    """
    one, two, four = ([f"island{n}" for n in range(count)] for count in (1, 2, 4))
    training = Training(forward, factor, 4 * ALL_CORES, cores=1)

    def pipelined(sizes: list[int], islands: list[str]) -> float:
        larger = training._replace(examples=4 * sum(sizes))
        machine = simulated_machine(sum(sizes), len(set(islands)), factor)
        return step_seconds(larger.pipelined(machine, sizes, islands), machine, larger.examples)

    def parallel(islands: list[str], more: float, chunks: int) -> float:
        machine = simulated_machine(ALL_CORES, len(islands), factor)
        sizes = [ALL_CORES // len(islands)] * len(islands)
        trained = training.parallel(machine, sizes, islands, more, chunks)
        return step_seconds(trained, machine, training.examples)

    return {
        ALL: parallel(one, SPMD, 1),
        **{case: pipelined([ALL_CORES // s] * s, one * s) for s, case in STAGES.items()},
        MORE: pipelined([32] * 16, one * 16),
        FOUR_ISLANDS: pipelined([8] * 16, [island for island in four for _ in range(4)]),
        EIGHT: parallel(one, 0.0, 1),
        HALVES: parallel(two, 0.0, 1),
        OVERLAPPED: parallel(two, 0.0, 4),
    }


def simulated_machine(cores: int, islands: int, factor: float) -> Any:
    """Islands of hosts as the paper's, apart as those of the real run."""
    import pathways_lab as pw

    return pw.Machine(
        islands, cores // CORES // islands, CORES,
        # What is not emulated cuts a batch, and updates parameters.
        default=pw.FunctionCost(seconds=20e-6),
        costs=pw.Costs(dcn_latency=LATENCY * factor, dcn=BANDWIDTH / factor, jitter=0.0),
    )  # fmt: skip


def step_seconds(trained: Any, machine: Any, examples: int) -> float:
    """From the first start to the last end of the gangs of one simulated step."""
    import jax
    import numpy as np

    import pathways_lab as pw
    from pathways_lab.timeline.records import Span

    x = jax.ShapeDtypeStruct((examples, WIDTH), np.float32)
    found = pw.simulate(trained.program.capture(trained.types(), x, x), machine)
    gangs = [r for r in found.timeline.records if isinstance(r, Span) and r.kind == "gang"]
    return max(gang.end for gang in gangs) - min(gang.start for gang in gangs)


def at_the_papers_size(found: Mapping[str, float]) -> str:
    """A table of what was simulated, beside the paper's own ratios (of throughput)."""
    four, sixteen = STAGES[4], STAGES[16]
    ratios = [
        *((f"GPipe S={s} / SPMD", paper, found[ALL] / found[STAGES[s]])
          for s, paper in ((4, 133.7 / 125.7), (8, 132.7 / 125.7), (16, 131.4 / 125.7))),
        ("S=16 / S=4", 131.4 / 133.7, found[four] / found[sixteen]),
        # Four times the cores take four times the examples in a step.
        ("S=16 on 512 cores / on 128", 507.8 / 131.4, 4 * found[sixteen] / found[MORE]),
        ("Figure 10: four islands / one", 1.0, found[sixteen] / found[FOUR_ISLANDS]),
        ("Figure 12: two islands / one of twice the size", 0.972, found[EIGHT] / found[HALVES]),
        ("Figure 12, overlapped", None, found[EIGHT] / found[OVERLAPPED]),
    ]  # fmt: skip
    rows = [("throughput, 128 cores", "paper", "simulated")]
    rows += [(name, f"{p:.3f}" if p else "", f"{ours:.3f}") for name, p, ours in ratios]
    return markdown(rows)


def beside_theory(training: Training, measured: Measured) -> str:
    """A table of what pipelines took, and would have taken were there nothing else."""
    rows = [("pipeline", "by theory", "measured", "own")]
    stages = {**{case: (s, DEVICES // s) for s, case in STAGES.items()}, FEW: (4, 1)}
    for case, (count, size) in stages.items():
        if samples := measured.of(case, ONE):
            theory, found = training.by_theory(count, size), spread(samples).median
            rows.append((case, seconds(theory), seconds(found), f"{found / theory - 1:.1%}"))
    return markdown(rows)


def merged(parts: list[Measured]) -> Measured:
    """Measurements that were taken one after the other, as one."""
    whole = parts[0]
    for part in parts[1:]:
        whole.times |= part.times
        whole.missing |= part.missing
    return whole


def main() -> None:
    """Measure, print, publish."""
    import pathways_lab as pw

    parser = arguments(__doc__, rounds=3, budget=3.0)
    parser.add_argument("--milliseconds", type=float, default=32.0, help="per layer and example")
    parser.add_argument("--factor", type=float, default=1.0, help="of the constants")
    parser.add_argument("--emulated", action="store_true", help="without Table 1")
    chosen = parser.parse_args()
    how = settings(chosen)
    ms, factor = 0.1 if how.quick else chosen.milliseconds, chosen.factor
    module, same = "benchmarks.gangs.trainings", {"forward": ms, "factor": factor}
    cases = list(dict.fromkeys((*TOGETHER, *APART)))
    emulated = measure(
        [Child(ONE, module, TOGETHER, apart=False, **same),
         Child(FOUR, module, APART, apart=True, **same)],
        cases, rounds=how.rounds, budget=min(how.budget, 1e-3), seed=how.seed,
    )  # fmt: skip
    parts = [emulated]
    if not chosen.emulated:
        with pw.start(islands=1, hosts_per_island=1, devices_per_host=4, progress=False) as lab:
            real = measure(
                [Way(lab, JAX), Way(lab, OURS)], list(MODELS),
                rounds=5 * how.rounds, budget=how.budget, seed=how.seed,
            )  # fmt: skip
        parts.append(real)
    measured = merged(parts)
    large = simulated(ms, factor)
    title = f"Trainings (emulated: {ms:g} ms per layer and example)"
    report = Report("training", title, "step", measured, ONE, {"simulated": large})
    report.verdicts = judged(CLAIMS, measured)
    report.notes += [
        "",
        verdict_table(report.verdicts),
        "",
        beside_theory(Training(ms, factor), measured),
        "",
        "Simulated, the same programs at the paper's size:",
        "",
        at_the_papers_size(large),
        "",
        f"Constants that fix the ratios, times {factor:g}. SPMD against GPipe, and numbers of"
        f" stages: collectives lengthen SPMD by {SPMD * factor:.1%}, and a stage by"
        f" {STAGE * factor:.2%} for each doubling of its cores. Figures 10 and 12: between"
        f" islands {LATENCY * factor * 1e6:.0f} us and {BANDWIDTH / factor / 1e6:.3g} MB/s.",
    ]
    publish(report, how.folder)


if __name__ == "__main__":
    main()
