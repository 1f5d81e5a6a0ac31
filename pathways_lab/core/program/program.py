"""Programs and plans: what a client captured, and what the cluster executes.

Problem: a program must be small however many shards it touches (paper, section
4.3: a chain of two sharded computations is four nodes for any number of
shards), it must be readable after every stage, and it must be fully known
before any data exist, so that all of it can be ordered, admitted and
dispatched ahead of the data.

Two forms of the same idea:

* :class:`Program`: location free.  Values and nodes; a value's placement is
  whatever its producer says.  Slices are *virtual*: slice numbers.
* :class:`Plan`: lowered.  A linear list of steps; each step is a gang (a call
  on all devices of a slice) or a transfer (from one slice's layout to
  another's), and says which values die with it.

Rule for maintainers: frozen data, no behaviour beyond lookups; shapes are
tuples of int, dtypes are JAX names (``"float32"``, ``"bfloat16"``,
``"key<fry>"``), so the core runs without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pathways_lab.core.program.layout import Layout

SliceId = int
ValueId = int
"""Index into ``Program.values`` / ``Plan.values``."""


def slice_name(number: SliceId) -> str:
    """The client's own number of it: the lower half of the number is the client's count."""
    return f"s{number & 0xFFFFFFFF}"


LONGEST_WINDOW = 1e9
"""Seconds: no longer window can be asked for, so that each is a number of microseconds."""


def is_window(seconds: float | None) -> bool:
    """Whether it can be granted so far ahead; None: as elsewhere is said."""
    return seconds is None or 0 <= seconds <= LONGEST_WINDOW


@dataclass(frozen=True, slots=True)
class Line:
    """The user's own line that caused a node: shown in errors and views."""

    file: str = ""
    number: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}" if self.number else "(no source line)"

    @property
    def told(self) -> str:
        """The same as users read it: a cell by its number."""
        name = called(self.file)
        return str(self) if name == self.file else f"{name}, line {self.number}: {self.text}"


NO_LINE = Line()
"""Where nobody knows."""

called: Callable[[str], str] = str
"""The name of a file for users; set by the module that knows the cells of a notebook."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a bundle (:mod:`pathways_lab.core.program.bundles`)."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    name: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    """One logical array, or a bundle.  slice and layout are None only before placement.

    nbytes: bytes of ONE device's shard.
    leaves: the arrays of a bundle, in their order; of an array there are none.
    """

    shape: tuple[int, ...]
    dtype: str
    slice: SliceId | None
    layout: Layout | None
    nbytes: int
    name: str = ""
    leaves: tuple[Leaf, ...] = ()


@dataclass(frozen=True, slots=True)
class When:
    """A condition: *value*, which a step of the program makes, is *case*.

    value: an int32 without dimensions.  cases: how many there are, 0 to ``cases - 1``.
    A value may say more: ``case + cases * (1 + rows)``, of which the timeline keeps *rows*.
    """

    value: ValueId
    case: int
    cases: int


@dataclass(frozen=True, slots=True)
class Call:
    """A compiled function on all devices of *slice*: one gang per run.

    function: key of the compiled function (hash of its content).
    donated: positions in *inputs* whose buffers the function may overwrite.
    ahead: False when it may be granted only once its inputs are resident.
    keep: a run goes on for its sake when nobody can read the results any more.
    window: device seconds that may lie before it when it gets its place; None: as the lab says.
    when: without this condition the step is skipped; None: it always runs.
    """

    function: str
    slice: SliceId
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    donated: tuple[int, ...] = ()
    name: str = ""
    line: Line = Line()
    ahead: bool = True
    keep: bool = False
    window: float | None = None
    when: When | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy *input* into *output*, which lives on another slice or layout.  when: see above.

    trimmed: rows of zeros at either end of a piece are not sent; its receiver makes them.
    """

    input: ValueId
    output: ValueId
    name: str = "transfer"
    line: Line = Line()
    when: When | None = None
    trimmed: bool = False


Node = Call | Transfer


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments and results of a compiled function, per flat leaf."""

    name: str
    slice: SliceId
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A captured program, in capture order (a legal linear order).

    inputs: values that a run binds to handles or arguments.
    outputs: values that a run returns as handles (may repeat, may be inputs).
    signatures: by function key.
    written: slices get their places in this order, and do not take turns.
    """

    name: str
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    signatures: dict[str, Signature] = field(default_factory=dict)
    written: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan.  frees: values whose last use this step is."""

    node: Node
    frees: tuple[ValueId, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A lowered program: the one linear order over all islands (rule 3).

    key: content hash; the same program lowered to the same slices has the same.
    slices: every slice that the plan touches, ascending.
    A value in *inputs* that is freed by a step is dropped from the run only:
    the handle, if one is kept, keeps the bytes.
    values, steps: tuples, or turns that are laid out when they are looked at
    (:mod:`~pathways_lab.core.program.folding`).
    """

    key: str
    name: str
    values: Sequence[Value]
    steps: Sequence[Step]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    slices: tuple[SliceId, ...]
