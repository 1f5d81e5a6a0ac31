"""A fault: what was expected of it, and what was seen.

Problem: a lab that survives a fault looks as if nothing had happened, and one
that does not survive looks the same until somebody waits for ever.  So what
shall happen is said before, and looked at afterwards: what the control plane
noticed and when, how every run ended that was under way, whether values
elsewhere are still there, and when the same devices computed right again.

Rule for maintainers: nothing is taken on trust here.  A sentence that was said
beforehand is checked by something that can fail, in bounded time.

Paper: section 4.6 (errors on failures).
"""

from __future__ import annotations

import contextlib
import functools
import html
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.topology_view import Island
from pathways_lab.client.parts import Parts
from pathways_lab.client.program.program import program
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.pending import Run
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.timeline.records import Event
from pathways_lab.timeline.text_table import TextTable

PATIENCE = 90.0
"""Seconds after the end of a fault within which everything must be well again."""
_PAUSE = 0.02
_PLUS: Callable[[Any, Any], Any] = operator.add
_VALUES = np.arange(8.0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected outcome of a fault, and the records that show it.

    notice: kinds of records of the timeline that mean that it was noticed; of which
        host, island or client *where* says.
    dies: hosts whose device process is another one afterwards.
    spares: nobody's runs fail.  blames: one of these words is in every failure's text.
    felt: some run after it fails for this reason.
    computes: islands that must compute right again.  between: pairs of islands
        with transfers that must be right again.
    """

    text: str
    notice: frozenset[str] = frozenset()
    where: frozenset[str] = frozenset()
    dies: frozenset[str] = frozenset()
    spares: bool = False
    blames: tuple[str, ...] = ()
    felt: bool = False
    computes: tuple[str, ...] = ()
    between: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Check:
    """One sentence, whether it was so, and what was seen."""

    what: str
    holds: bool
    seen: str


def as_lines(checks: Iterable[Check]) -> list[str]:
    """One line for each."""
    return [f"  [{'ok' if c.holds else '!!'}] {c.what}: {c.seen}" for c in checks]


def as_table(checks: Iterable[Check]) -> str:
    """The same for a page."""
    rows = [("\u2713" if c.holds else "\u2717", c.what, c.seen) for c in checks]
    return TextTable(rows)._repr_html_()


@dataclass(slots=True)
class _Before:
    """The state before a fault."""

    pids: dict[str, int]
    runs: tuple[Run, ...]
    kept: dict[str, tuple[Handle, Any]] = field(default_factory=dict)
    """By island that the fault does not touch: a value on its devices."""


class Fault:
    """Something that was broken on purpose; made by ``lab.chaos``.

    title: what was done.  expected: what shall come of it.  began: on the lab's clock.
    begin(): answers how long it took until the fault was there, if that matters.
    lasts: seconds.  detected, recovered: seconds after it began, or None.
    checks: what was seen, after :meth:`report`.

    >>> with lab.chaos.kill("island0/host1") as fault:       # doctest: +SKIP
    ...     out = f(x)
    >>> fault                                                # doctest: +SKIP
    """

    def __init__(
        self,
        lab: Parts,
        title: str,
        expected: Expected,
        begin: Callable[[], float | None],
        lasts: float = 0.0,
        end: Callable[[], object] = lambda: None,
        look: Callable[[], Sequence[Check]] = tuple,
    ) -> None:
        self.title = title
        self.expected = expected
        self.lasts = lasts
        self.checks: list[Check] = []
        self.detected: float | None = None
        self.recovered: float | None = None
        self._lab = lab
        self._end = end
        self._look = look
        self._over = False
        print(f"{title}\n  expected: {expected.text}", flush=True)
        self._before = self._keep()
        self.began = self._now()
        self._version = lab.timeline.version
        self._events: list[Event] = []
        self.began += begin() or 0.0
        # From when it is there: to ask a busy worker for it can take seconds.
        self._lasts_until = self._now() + lasts

    def _now(self) -> float:
        return time.monotonic() + self._lab.session.connection.link.clock.offset

    def _keep(self) -> _Before:
        """The parts that must be the same afterwards."""
        lab = self._lab
        before = _Before(_pids(lab.islands), lab.session.connection.runs)
        touched = {host.partition("/")[0] for host in self.expected.dies}
        with contextlib.ExitStack() as held:
            for island in lab.islands:
                if self.expected.dies and island.name not in touched:
                    there = lab.slice(island.devices, axes="x", island=island.name, wait=False)
                    value = _summed(held.enter_context(there))
                    before.kept[island.name] = value, value.result(timeout=PATIENCE)
            held.pop_all()
        return before

    # --- the end ------------------------------------------------------------------------

    def end(self) -> None:
        """Put an end to what still goes on; again is fine."""
        if not self._over:
            self._over = True
            self._end()

    def report(self, patience: float = PATIENCE) -> Fault:
        """Wait until it is over and all is well again, look whether it was so, and answer this.

        patience: seconds, from now or from the end of the fault.
        """
        if self.checks:
            return self
        if not self._over:
            time.sleep(max(0.0, self._lasts_until - self._now()))
            self.end()
        until = time.monotonic() + patience
        self._noticed(until)
        self._runs_ended(until)
        if not self._lab.closed:
            self._hosts(until)
            self._works(until)
            self._values()
        self.checks += self._look()
        return self

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.report()
        else:
            self.end()

    @property
    def ok(self) -> bool:
        """Whether everything that was expected was so."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    # --- looking ------------------------------------------------------------------------

    def _noticed(self, until: float) -> None:
        expected = self.expected
        if not expected.notice:
            return
        while self.detected is None and time.monotonic() < until:
            for record in self._happened():
                if record.kind in expected.notice and expected.where & {
                    record.host,
                    record.island,
                    record.client,
                }:
                    self.detected = record.time - self.began
                    text = str(record.args.get("reason") or record.args.get("text") or "")
                    about = record.host or record.client or record.island
                    seen = f"{record.kind} {about} after {self.detected:.2f} s: {text[:160]}"
                    self._saw("it is noticed", True, seen)
                    return
            time.sleep(_PAUSE)
        self._saw("it is noticed", False, "nothing in the timeline says so")

    def _happened(self) -> list[Event]:
        """All events since the fault began; a busy lab has many records, so each is read once."""
        new = self._lab.timeline.since(self._version)
        self._version = new.version
        kinds = {*self.expected.notice, "failed"}
        self._events += [r for r in new.records if isinstance(r, Event) and r.kind in kinds]
        return self._events

    def _runs_ended(self, until: float) -> None:
        """Every run that was under way has ended, and every failure says why."""
        runs, board = self._before.runs, self._lab.session.connection.board
        try:
            board.wait(
                lambda: all(r.done for r in runs), max(0.1, until - time.monotonic()), "the runs"
            )
        except TimeoutError:
            open_ = sum(not run.done for run in runs)
            self._saw("every run ends", False, f"{open_} of {len(runs)} runs have not ended")
            return
        failures = [run.failure for run in runs if run.failure is not None]
        seen = f"{len(runs) - len(failures)} ended well, {len(failures)} failed"
        blames = self.expected.blames
        foreign = [f for f in failures if not any(word in str(PathwaysError(f)) for word in blames)]
        if self.expected.spares:
            self._saw("every run under way ends well", not failures, seen)
        else:
            if foreign:
                seen += f"; not for this reason: {foreign[0].message[:160]}"
            self._saw("every run under way ends, with a reason if it fails", not foreign, seen)

    def _hosts(self, until: float) -> None:
        before, dies = self._before.pids, self.expected.dies
        while True:
            now = _pids(self._lab.islands)
            back = all(now.get(host) not in (None, before.get(host)) for host in dies)
            if back or time.monotonic() > until:
                break
            time.sleep(_PAUSE)
        if dies:
            self._saw("lost hosts are back", back, ", ".join(sorted(dies)))
        others = [h for h, pid in before.items() if h not in dies and now.get(h) != pid]
        self._saw(
            "other hosts are untouched", not others, ", ".join(others) or "the same processes"
        )

    def _works(self, until: float) -> None:
        """The devices compute right again, together and with others."""
        for island in self.expected.computes:
            self._again(until, f"{island} computes right", functools.partial(self._compute, island))
        for pair in self.expected.between:
            text = "transfers {} to {} are right".format(*pair)
            self._again(until, text, functools.partial(self._transfer, *pair))

        if self.expected.felt:
            self._is_felt(until)

    def _is_felt(self, until: float) -> None:
        """Somebody's run has failed for this reason."""
        while time.monotonic() < until:
            for record in self._happened():
                if record.kind == "failed":
                    text = str(record.args.get("message", ""))
                    if any(word in text for word in self.expected.blames):
                        self.detected = record.time - self.began
                        self._saw("it is felt, and said", True, text[:200])
                        return
            time.sleep(_PAUSE)
        self._saw("it is felt, and said", False, "no run failed for this reason")

    def _again(self, until: float, what: str, work: Callable[[], bool]) -> None:
        seen, right = "it was not tried", False
        while not right and time.monotonic() < until:
            try:
                right = work()
                seen = f"{self._now() - self.began:.2f} s after it began"
                if not right:
                    break
            except (PathwaysError, TimeoutError) as error:
                seen = str(error)[:200]
                time.sleep(0.1)
        if right:
            self.recovered = max(self.recovered or 0.0, self._now() - self.began)
        self._saw(what, right, seen)

    def _compute(self, island: str) -> bool:
        for there in self._lab.islands:
            if there.name == island:
                on = self._lab.slice(there.devices, axes="x", island=island, wait=False)
                try:
                    return _right(_summed(on).result(timeout=PATIENCE))
                finally:
                    on.release()
        raise PathwaysError(Failure("lost", f"{island} has no hosts"))

    def _transfer(self, source: str, target: str) -> bool:
        with contextlib.ExitStack() as held:
            ends = [
                held.enter_context(self._lab.slice(1, island=island, wait=False))
                for island in (source, target)
            ]
            first, second = (
                CompiledFunction(f, on=on, name="probe")
                for f, on in zip((lambda x: 2 * x, lambda x: x + 1), ends, strict=True)
            )
            call = program(lambda x: second(first(x)), name="probe")
            found = call(_VALUES).result(timeout=PATIENCE)
            return np.array_equal(found, 2 * _VALUES + 1)

    def _values(self) -> None:
        while self._before.kept:
            island, (handle, value) = self._before.kept.popitem()
            try:
                # Computed with again: what the handle remembers would prove nothing.
                one_more: Any = _PLUS(handle, 1)
                same = np.array_equal(one_more.result(timeout=PATIENCE), value + 1)
                seen = "the same values" if same else "other values"
            except (PathwaysError, TimeoutError) as error:
                same, seen = False, str(error)[:200]
            finally:
                if not self._lab.closed:
                    handle.slice.release()
            self._saw(f"values on {island} are still there", same, seen)

    def _saw(self, what: str, holds: bool, seen: str) -> None:
        self.checks.append(Check(what, holds, seen))

    # --- showing ------------------------------------------------------------------------

    def _times(self) -> str:
        times: Mapping[str, float | None] = {"noticed": self.detected, "well again": self.recovered}
        told = [f"{what} after {t:.2f} s" for what, t in times.items() if t is not None]
        return ", ".join(told)

    def __repr__(self) -> str:
        if not self.checks:
            return f"<Fault: {self.title}; fault.report() waits and looks>"
        lines = [f"{self.title}: {'as expected' if self.ok else 'NOT as expected'}", self._times()]
        lines += as_lines(self.checks)
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        if not self.checks:
            return f"<p>{html.escape(repr(self))}</p>"
        verdict = "as expected" if self.ok else "<b>not as expected</b>"
        return (
            f"<p><b>{html.escape(self.title)}</b>: {verdict}. {html.escape(self._times())}<br>"
            f"<i>Expected: {html.escape(self.expected.text)}</i></p>{as_table(self.checks)}"
        )


def _pids(islands: Sequence[Island]) -> dict[str, int]:
    return {host.name: host.pid for island in islands for host in island.hosts}


def _summed(on: Slice) -> Handle:
    """On all devices of a slice, by a collective: the sum of some numbers."""
    body = jax.shard_map(
        lambda x: x * 0 + jax.lax.psum(x.sum(), "x"),
        mesh=on.mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    total = CompiledFunction(body, on=on, in_shardings=P("x"), out_shardings=P("x"), name="probe")
    value: Handle = total(np.arange(on.mesh.size, dtype=np.float32))
    return value


def _right(value: Any) -> bool:
    """Whether that is what :func:`_summed` must give."""
    count = len(value)
    return np.array_equal(value, np.full(count, count * (count - 1) / 2, np.float32))
