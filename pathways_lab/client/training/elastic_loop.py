"""``lab.elastic``: a training loop that survives its islands, and uses those that come.

Problem: a long training must not end because an island does.  Its state can be
had again only from somewhere else, and what it was computing then must be
computed again, in the same arithmetic, so that the losses are those of a run
that nothing happened to.

How: copies of the state stay on several islands, as handles that are simply
kept.  When a slice is lost, the loop takes the newest copy that lives, computes
the steps since again (their batches are kept too), and goes on with the islands
that are there; what was yielded is not yielded twice.  A slice whose island is
there again is bound to it again, so its programs are there already.

A batch is cut into a fixed number of parts, each of which is computed by the
same code on a slice of the same shape wherever it lies, and gradients are added
in the order of the parts: so the number of islands does not change a bit.

Rule for maintainers: everything is public API of the lab (slices, programs,
handles); failures other than lost devices are the user's.

Paper: section 4.1 (resources are added and removed); section 5.3 (training over
several islands).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pathways_lab.client.functions.jit import CompiledFunction
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.tags import NOTHING, Tag, beneath
from pathways_lab.client.parts import Parts
from pathways_lab.client.program.program import ProgramFunction, device_put
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import PathwaysError

_NEWS_SECONDS = 20.0
"""How long the loss of a slice may take to be known after something failed of it."""

Tree = Any


class Step(NamedTuple):
    """step: its number.  state: after it, as handles.  out: values, on this host."""

    step: int
    state: Tree
    out: Tree


@dataclass(slots=True)
class _Copy:
    """The state before step *step*, on islands."""

    step: int
    states: dict[str, Tree]


@dataclass(slots=True)
class _Flying:
    """A step that was submitted.  states: after it, by island.  outs: by part."""

    step: int
    states: dict[str, Tree]
    outs: list[Tree]


@dataclass(slots=True, eq=False)
class Elastic:
    """A training loop over islands; iterate over it.

    members: the islands that compute now, in the order in which they take parts.
    tag: of its runs.
    story: what happened to it: ``(step, text)``.
    """

    lab: Parts
    train_step: Callable[..., Any]
    state: Tree
    batches: Iterable[Tree]
    update: Callable[..., Any] | None
    islands: Sequence[str] | None
    devices: int
    parts: int
    replicas: int
    every: int
    ahead: int
    state_sharding: Any
    batch_sharding: Any
    start: int = 0
    tag: Tag = NOTHING
    story: list[tuple[int, str]] = field(default_factory=list)
    slices: dict[str, Slice] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    _programs: dict[tuple[str, ...], Any] = field(default_factory=dict)
    _functions: dict[str, tuple[CompiledFunction, CompiledFunction]] = field(default_factory=dict)
    _copies: list[_Copy] = field(default_factory=list)
    _given: int = 0
    """The first step that was not yielded."""
    _kept: dict[int, Tree] = field(default_factory=dict)
    """Batches since the oldest copy, by step."""

    # --- the loop ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        self._grow(self.start)
        if not self.members:
            raise failures.refused(
                f"no island has {self.devices} devices for the loop,"
                " or a lease or a quota keeps them",
                "name islands that are there, or ask for fewer devices",
            )
        source = iter(self.batches)
        states = {name: self._put(self.state, name) for name in self._holders()}
        self._copies = [_Copy(self.start, states)]
        flying: list[_Flying] = []
        at = fetched = self._given = self.start
        try:
            while True:
                try:
                    while len(flying) <= self.ahead:
                        if at == fetched and not self._fetch(source, at):
                            break
                        fetched = max(fetched, at + 1)
                        states = self._join(at, states)
                        flying.append(self._submit(at, states))
                        states, at = flying[-1].states, at + 1
                        if at % self.every == 0:
                            self._copy(at, states)
                    if not flying:
                        return
                    done = flying[0]
                    out = self._value(done)
                except PathwaysError as error:
                    at, states = self._recover(error)
                    flying.clear()
                    continue
                flying.pop(0)
                if done.step >= self._given:
                    self._given = done.step + 1
                    yield Step(done.step, next(iter(done.states.values())), out)
        finally:
            self.close()

    def _fetch(self, source: Iterator[Tree], step: int) -> bool:
        """Take one more batch, and forget those that no copy needs."""
        try:
            batch = next(source)
        except StopIteration:
            return False
        first = self._copies[0].step
        self._kept = {s: b for s, b in self._kept.items() if s >= first}
        self._kept[step] = batch
        return True

    def _value(self, done: _Flying) -> Tree:
        """The result of a step, once it and its states are there."""
        outs = jax.device_get(done.outs)
        for states in done.states.values():
            jax.block_until_ready(states)
        if self.update is None:
            return outs[0]
        return jax.tree.map(lambda *parts: np.mean(np.stack(parts), axis=0), *outs)

    def close(self) -> None:
        """Give its slices back; states that were yielded stay while you have them."""
        for on in self.slices.values():
            on.release()
        self.slices.clear()
        self.members.clear()
        self._copies.clear()
        self._kept.clear()

    # --- islands -------------------------------------------------------------------------

    def _there(self) -> list[str]:
        """Islands of the loop that have enough devices now.

        One that has lost a host is not asked: the answer would wait until that is there again.
        """
        down = {each["island"] for each in self.lab.session.connection.down}
        found = [i.name for i in self.lab.islands if i.devices >= self.devices]
        return [n for n in found if n not in down and (self.islands is None or n in self.islands)]

    def _grow(self, step: int) -> list[str]:
        """Take slices on islands that are new, or there again; their names.

        One that a lease or a quota keeps from the loop is asked for again before the next step:
        who waits in line does not train.
        """
        come = []
        for name in self._there():
            on = self.slices.get(name)
            if name in self.members or (on is not None and on.state == "bound"):
                continue
            try:
                if on is None:
                    self.slices[name] = self.lab.slice(
                        self.devices, "data", island=name, wait=False
                    )
                else:
                    on.rebind(island=name)
            except PathwaysError as error:
                if error.failure.kind not in ("refused", "lost"):
                    raise
                continue
            self.members.append(name)
            come.append(name)
        if come and step != self.start:
            self._tell(step, f"{' and '.join(come)} joined")
        return come

    def _join(self, step: int, states: dict[str, Tree]) -> dict[str, Tree]:
        """Islands that have come get the state from one that has it."""
        self._grow(step)
        missing = [name for name in self._holders() if name not in states]
        if missing:
            source = next(iter(states.values()))
            states = {**states, **{name: self._put(source, name) for name in missing}}
        return states

    def _holders(self) -> list[str]:
        """Islands that need the state of every step: those that compute."""
        return self.members if self.update is not None else self.members[:1]

    def _whole(self, name: str) -> Any:
        return jax.tree.map(self.slices[name].sharding, self.state_sharding)

    def _put(self, tree: Tree, name: str) -> Tree:
        """A state, arrays or handles, on an island."""
        with beneath(self.tag):
            return device_put(tree, self._whole(name))

    # --- steps ---------------------------------------------------------------------------

    def _submit(self, step: int, states: dict[str, Tree]) -> _Flying:
        holders = self._holders()
        program = self._program(tuple(holders))
        batch = self._kept[step]
        if self.update is None:
            parts = [batch]
        else:
            cut = [np.array_split(leaf, self.parts) for leaf in jax.tree.leaves(batch)]
            tree = jax.tree.structure(batch)
            parts = [jax.tree.unflatten(tree, list(leaves)) for leaves in zip(*cut, strict=True)]
        with beneath(self.tag):
            after, outs = program([states[name] for name in holders], parts)
        return _Flying(step, dict(zip(holders, after, strict=True)), outs)

    def _program(self, members: tuple[str, ...]) -> ProgramFunction:
        """One step over these islands: captured and lowered once for each set of them."""
        known = self._programs.get(members)
        if known is None:
            functions = [self._compiled(name) for name in members]
            slices = [self.slices[name] for name in members]
            alone, count = self.update is None, len(members)

            def elastic_step(states: list[Tree], parts: list[Tree]) -> Any:
                if alone:
                    state, out = functions[0][0](states[0], parts[0])
                    return [state], [out]
                made = [functions[p % count][0](states[p % count], x) for p, x in enumerate(parts)]
                after = []
                for number, on in enumerate(slices):
                    here = [
                        gradient if p % count == number else device_put(gradient, on)
                        for p, (gradient, _) in enumerate(made)
                    ]
                    after.append(functions[number][1](states[number], here))
                return after, [out for _, out in made]

            known = self._programs[members] = ProgramFunction(elastic_step)
        return known

    def _compiled(self, name: str) -> tuple[CompiledFunction, CompiledFunction]:
        """The step, and the update, for an island."""
        known = self._functions.get(name)
        if known is None:
            on, update, count = self.slices[name], self.update, self.parts
            alone = update is None

            def apply(state: Tree, gradients: list[Tree]) -> Tree:
                total = jax.tree.map(lambda *g: sum(g[1:], g[0]) / count, *gradients)
                assert update is not None
                return update(state, total)

            step = CompiledFunction(
                self.train_step,
                on=on,
                in_shardings=(self.state_sharding, self.batch_sharding),
                out_shardings=(self.state_sharding if alone else PartitionSpec(), PartitionSpec()),
            )
            whole = CompiledFunction(
                apply,
                on=on,
                in_shardings=(self.state_sharding, PartitionSpec()),
                out_shardings=self.state_sharding,
                name=getattr(update, "__name__", "update"),
            )
            known = self._functions[name] = step, whole
        return known

    # --- copies, and what they are for -----------------------------------------------------

    def _copy(self, step: int, states: dict[str, Tree]) -> None:
        """Keep the state before *step* on as many islands as wanted; older ones may go."""
        states = dict(states)
        source = next(iter(states.values()))
        for name in self.members:
            if len(states) >= self.replicas:
                break
            if name not in states:
                states[name] = self._put(source, name)
        self._copies.append(_Copy(step, states))
        complete = [
            c
            for c in self._copies
            if c.step <= self._given and all(map(_ready, jax.tree.leaves(c.states)))
        ]
        if complete:
            newest = complete[-1].step
            self._copies = [c for c in self._copies if c.step >= newest]

    def _recover(self, error: PathwaysError) -> tuple[int, dict[str, Tree]]:
        """After the loss of a slice: from which step, and from which states, to go on."""
        gone = self._lost(error)
        self.members = [name for name in self.members if name not in gone]
        for copy in reversed(self._copies):
            if copy.step > self._given:
                continue  # what was not yielded before it would never be
            for name, state in copy.states.items():
                if name in self.members and _good(state):
                    self._copies = [c for c in self._copies if c.step <= copy.step]
                    return self._again(copy, name, gone)
        # Perhaps its hosts live and only their connections broke; the values are gone.
        names = ", ".join(sorted({n for c in self._copies for n in c.states}))
        raise failures.failure(
            "lost",
            f"every copy of the state was lost: it was on {names}, and {' and '.join(gone)}"
            " was lost",
            f"keep it on more islands (replicas={self.replicas + 1})",
        ) from error

    def _again(self, copy: _Copy, name: str, gone: Sequence[str]) -> tuple[int, dict[str, Tree]]:
        source = copy.states[name]
        states = {name: source}
        # First the island that has it: it need not be sent to go on.
        self.members.sort(key=lambda member: member != name)
        for member in self._holders():
            state = copy.states.get(member)
            if member not in states:
                good = state is not None and _good(state)
                states[member] = state if good else self._put(source, member)
        who = " and ".join(gone)
        self._tell(copy.step, f"{who} was lost: on from step {copy.step} with {len(self.members)}")
        return copy.step, {member: states[member] for member in self._holders()}

    def _lost(self, error: PathwaysError) -> list[str]:
        """Islands whose slice is gone; raises *error* when that is not what has happened."""

        def found() -> list[str]:
            return [name for name in self.members if self.slices[name].state == "lost"]

        if error.failure.kind not in ("lost", "cancelled") or self.lab.closed:
            raise error
        try:
            board = self.lab.session.connection.board
            board.wait(lambda: bool(found()) or self.lab.closed, _NEWS_SECONDS, "news of a loss")
        except TimeoutError:
            raise error from None
        if self.lab.closed:
            raise error
        return found()

    # --- looks -----------------------------------------------------------------------------

    def _tell(self, step: int, text: str) -> None:
        self.story.append((step, text))

    def __repr__(self) -> str:
        lines = [f"<elastic training on {', '.join(self.members) or 'no island yet'}>"]
        return "\n".join(lines + [f"  step {step}: {text}" for step, text in self.story])

    def _repr_html_(self) -> str:
        return html.escape(repr(self)).replace("\n", "<br>")


def _ready(handle: Any) -> bool:
    return not isinstance(handle, Handle) or handle.state == "ready"


def _good(tree: Tree) -> bool:
    """Whether a state has its value, waiting for it; False when it is lost."""
    try:
        jax.block_until_ready(tree)
    except PathwaysError:
        return False
    return True
