"""A cell as a program that the notebook can run again.

Problem: ``%%pw_program train`` shall do once what the cell says, and leave
``train`` behind, which does it again with the names' present values.

Rule for maintainers: ties a :class:`~pathways_lab.notebook.kernel.cell_text.Cell` to the
client's cell programs and to the notebook's names; shows nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.tags import tagged
from pathways_lab.client.program.cell_program import CapturedCell, CellProgram
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.program.program import AHEAD, How
from pathways_lab.client.session.handles import Handle
from pathways_lab.client.session.pending import Buffer
from pathways_lab.core.program.program import Call
from pathways_lab.notebook.kernel.cell_text import VALUE, Cell, at_home


@dataclass(slots=True)
class Done:
    """One submitted run of a cell.

    value: of the last expression.  assigned: by name, what the cell assigned.
    buffers: what the run makes; they end when it ends, and keep no array alive.
    runs: numbers of the runs that make the results.  gangs: how many gangs these have.
    since: when it was submitted (the records' clock); None: that is not known.
    """

    value: Any = None
    assigned: dict[str, Any] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    runs: frozenset[int] = frozenset()
    gangs: int = 0
    since: float | None = None

    @property
    def outcome(self) -> str:
        """``""`` while results are outstanding, else how the run ended."""
        if not all(buffer.done for buffer in self.buffers):
            return ""
        kinds = {buffer.failure.kind for buffer in self.buffers if buffer.failure}
        if kinds == {"cancelled"}:
            return "cancelled"
        return "failed" if kinds else "finished"


class NotebookProgram:
    """The value of ``name`` after ``%%pw_program name``: call it to run the cell again.

    names: the notebook's own names; a call reads and sets them.
    """

    def __init__(
        self,
        name: str,
        cell: Cell,
        names: dict[str, Any],
        on: Slice | None,
        priority: int,
        how: How = AHEAD,
    ) -> None:
        self.__name__ = name
        self._cell = cell
        self._names = names
        self._priority = priority
        self._away: dict[str, Any] = {}
        self._program = CellProgram(self._execute, name, on, how)

    def _execute(self, names: dict[str, Any]) -> None:
        self._away = names
        self._cell.run(names)

    def _values(self, changed: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(changed.keys() - self._cell.reads)
        if unknown:
            known = ", ".join(sorted(self._cell.reads & self._names.keys())) or "nothing"
            raise TypeError(f"the cell does not read {unknown[0]!r}; it reads {known}")
        present = {name: self._names[name] for name in self._cell.reads if name in self._names}
        return {**present, **changed}

    def capture(self) -> CapturedCell:
        """Capture the cell for the names' present values, without running it."""
        return self._program.capture(self._values({}))

    def run(self, **changed: Any) -> Done:
        """Submit one run and set the notebook's names; handles, at once.

        changed: other values for names that the cell reads, in this run only.
        """
        with tagged(priority=self._priority or None):
            assigned = self._program(self._values(changed))
        done = Done(assigned.pop(VALUE, None), gangs=self.gangs)
        for name, value in assigned.items():
            done.assigned[name] = at_home(value, self._names, self._away)
        self._names.update(done.assigned)
        done.buffers = [handle.pending for handle in handles_in([*assigned.values(), done.value])]
        done.runs = frozenset(buffer.run for buffer in done.buffers if buffer.run)
        return done

    def __call__(self, **changed: Any) -> Any:
        """Run the cell again; returns the value of its last expression."""
        return self.run(**changed).value

    @property
    def ready(self) -> tuple[Prepared, ...]:
        """The programs that runs of the cell have come to."""
        return self._program.ready

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names, and places in containers, whose arrays are inputs of the program."""
        return self._program.last.inputs if self._program.last else ()

    @property
    def _prepared(self) -> Prepared | None:
        last = self._program.last
        return last.program.prepared if last else None

    @property
    def runs(self) -> bool:
        """Whether anything in it runs on a device."""
        return self._prepared is not None

    @property
    def gangs(self) -> int:
        """How many gangs one run has."""
        steps = self._prepared.plan.steps if self._prepared else ()
        return sum(isinstance(step.node, Call) for step in steps)

    @property
    def may_print(self) -> bool:
        """Whether its functions hold code that may print on hosts."""
        functions = self._prepared.functions if self._prepared else ()
        return any(code.kind != "export" for code, _ in functions)

    def ir(self) -> str:
        """Every stage of the program as text."""
        return self._program.ir()

    def __repr__(self) -> str:
        return f"<program {self.__name__}: reads {', '.join(self.inputs) or 'no arrays'}>"


def handles_in(value: Any, seen: set[int] | None = None) -> Iterator[Handle]:
    """Handles in nested lists, tuples and dicts, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Handle):
        if value.failure is None:
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from handles_in(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from handles_in(each, seen)
