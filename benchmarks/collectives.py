"""All-reduces over two machines: in the clear, and through TLS.

``python -m benchmarks.collectives``, by root on Linux: two network namespaces with a cable between
them are two machines.  Each has a host with one device, and both are one island of a lab.  A
unit is one all-reduce among many in one computation, so the clear one is JAX's own, and the lab
adds nothing to it.  All of it computes and encrypts on the processors of this one machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.child import ROOT
from benchmarks.harness.command import arguments, settings
from benchmarks.harness.figure import curves
from benchmarks.harness.numbers import spread
from benchmarks.harness.report import Report, grid, publish
from benchmarks.harness.rounds import Missing, Timed, measure

SIZES = {"16 B": 16, "64 KiB": 1 << 16, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
_LARGE = 1 << 20
CLEAR, SEALED = "in the clear", "through TLS"
_networks = itertools.count(78)

CLIENT = """
import functools, json, sys, time
import distributed, jax, numpy as np, pathways_lab as pw
address, plain = sys.argv[1], sys.argv[2] == "plain"
with distributed.Client(address) as client: client.wait_for_workers(2)
lab = pw.connect(address, plain_collectives=plain)
on = lab.slice(2, axes=("x",))
halves = jax.P("x")
def each(x, times):
    return jax.lax.fori_loop(0, times, lambda _, y: jax.lax.psum(y, "x") / 2, x)
where = dict(in_specs=(halves, jax.P()), out_specs=halves, check_vma=False)
body = jax.shard_map(each, mesh=on.mesh, **where)
of = pw.jit(body, on=on, in_shardings=(halves, jax.P()), out_shardings=halves)
@functools.cache
def ones(size):
    value = pw.jit(lambda: jax.numpy.ones(2 * size // 4), on=on, out_shardings=halves)()
    of(value, np.int32(1)).block_until_ready()
    return value
print("ready", flush=True)
for line in sys.stdin:
    size, times = json.loads(line)
    value = ones(size)
    begun = time.perf_counter()
    of(value, np.int32(times)).block_until_ready()
    print(time.perf_counter() - begun, flush=True)
"""


class Reduces:
    """A lab of two machines, whose client obeys one line after the other."""

    cases: Sequence[str] = tuple(SIZES)

    def __init__(self, name: str) -> None:
        self.name = name
        self._undo = ExitStack()

    def start(self) -> None:
        if not sys.platform.startswith("linux") or os.geteuid():
            raise Missing("two machines are network namespaces of Linux, which only root makes")
        folder = self._undo.enter_context(tempfile.TemporaryDirectory())
        python, network = sys.executable, next(_networks)
        certs = f"{folder}/certs"
        subprocess.run(
            [python, "-m", "pathways_lab", "cluster", "certs", certs], check=True, cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        machines = [self._begin("unshare", "--net", "cat", folder=folder) for _ in range(2)]
        ends = [f"pwb{network}{end}" for end in "ab"]
        self._ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (end, machine) in enumerate(zip(ends, machines, strict=True), 1):
            self._ip("link", "set", end, "netns", str(machine.pid))
            inside = ("nsenter", "-t", str(machine.pid), "-n", "ip")
            for order in (
                f"addr add 10.{network}.0.{number}/24 dev {end}",
                f"link set {end} up",
                "link set lo up",
            ):
                subprocess.run([*inside, *order.split()], check=True)
        address = f"tls://10.{network}.0.1:8786"
        options = ("--no-dashboard", "--protocol", "tls")

        def on(machine: int, *command: str) -> subprocess.Popen[str]:
            place = ("nsenter", "-t", str(machines[machine].pid), "-n", python)
            return self._begin(*place, *command, folder=folder, certs=certs)

        at = f"10.{network}.0"
        on(0, "-m", "distributed.cli.dask_scheduler", "--host", f"{at}.1", *options)
        for number in range(2):
            where = ("--host", f"{at}.{number + 1}", "--name", f"west/{number}", "--no-nanny")
            module = ("-m", "distributed.cli.dask_worker", address, "--resources", "devices=1")
            on(number, *module, *where, *options)
        how = "plain" if self.name == CLEAR else "sealed"
        self._client = on(0, "-c", CLIENT, address, how)
        self._hear("ready")

    def round(self, case: str, units: int) -> Timed:
        # Beside so many the call itself is nothing.
        times = max(units, 400 if SIZES[case] < _LARGE else 4)
        return Timed(self._ask(case, times), times)

    def stop(self) -> None:
        self._undo.close()

    def _ask(self, case: str, times: int) -> float:
        assert self._client.stdin
        self._client.stdin.write(f"[{SIZES[case]}, {times}]\n")
        self._client.stdin.flush()
        return float(self._hear())

    def _hear(self, wanted: str = "") -> str:
        assert self._client.stdout
        for line in self._client.stdout:
            if not wanted or line.strip() == wanted:
                return line
        raise Missing(f"its client has ended: {self._log.read_text()[-300:]!r}")

    def _begin(self, *command: str, folder: str, certs: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "DASK_CONFIG": certs, "PYTHONPATH": str(ROOT)}
        self._log = Path(folder, "log")
        log = self._undo.enter_context(self._log.open("a"))
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stderr=log,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._undo.callback(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()

    @staticmethod
    def _ip(*order: str) -> None:
        subprocess.run(["ip", *order], check=True)


def main() -> None:
    """Measure, print, publish."""
    parser = arguments(__doc__, rounds=7, budget=0.3)
    parser.add_argument("--largest", choices=SIZES, default=list(SIZES)[-1], help="array")
    chosen = parser.parse_args()
    how = settings(chosen)
    cases = [case for case, size in SIZES.items() if size <= SIZES[chosen.largest]]
    systems = [Reduces(CLEAR), Reduces(SEALED)]
    measured = measure(systems, cases, rounds=how.rounds, budget=how.budget, seed=how.seed)
    title = "Collectives between machines"
    report = Report("collectives", title, "all-reduce", measured, CLEAR)
    text = ["Time per all-reduce, and times that of one in the clear:", ""]
    text.append(grid(measured, {case: case for case in cases}, report.reference))
    rates = {
        system.name: [
            (float(SIZES[case]), SIZES[case] / spread(samples).median)
            for case in cases
            if (samples := measured.of(case, system.name))
        ]
        for system in systems
    }
    text += [f"Without {name}: {why}." for name, why in measured.missing.items()]
    drawn = curves(title, {k: v for k, v in rates.items() if v}, "bytes", "bytes per second")
    publish(report, how.folder, "\n".join(text), drawn)


if __name__ == "__main__":
    main()
