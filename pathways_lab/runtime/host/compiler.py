"""Compiled functions on a host: from the code that travelled to an executable.

Problem: compiling takes from 50 ms to minutes and must neither hold up the
host nor happen twice.  Code arrives as a ``jax.export`` artefact, perhaps with
pickled callbacks.  And the launch thread must learn when and how a gang ended
even if all its results were donated meanwhile, or it has none.

How: a small pool compiles ahead of time for the devices of the slice.  Every
executable returns one more array, the *receipt*: a byte on each device that is
there when the gang is over, and that raises the gang's error.  Random keys enter and
leave as their key data.

Rule for maintainers: shardings are pinned on both sides; one content, one set
of layouts, one order of devices: one compilation.

Paper: section 4.2 (registering computations), section 4.5.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from pathways_lab.core.errors import Failure
from pathways_lab.core.program.bundles import APART
from pathways_lab.core.program.layout import Layout
from pathways_lab.runtime import arrays, emulated, jax_callbacks, nan_checks
from pathways_lab.runtime.client_messages import Function, Loop
from pathways_lab.runtime.devices import Footprint, Place
from pathways_lab.runtime.host.compile_marks import NO_NOTES, Notes
from pathways_lab.runtime.host.host_loop import Laps, run
from pathways_lab.runtime.host.user_output import Gangs, Output
from pathways_lab.runtime.islands import dcn_collectives
from pathways_lab.runtime.processes import heaps
from pathways_lab.transport.codec import unpack_fields

_KEPT = 512
"""Executables that a footprint keeps for functions that may come again."""

warnings.filterwarnings("ignore", message="Some donated buffers were not usable")

Types = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and JAX type name per leaf."""


@dataclass(frozen=True, slots=True)
class Code(Function):
    """A compiled function as it travels, for one slice, with its code."""

    blob: Any = b""

    @classmethod
    def from_wire(cls, fields: dict[str, Any], blob: Any) -> Code:
        """Raises ValueError for what is no description of a function."""
        said = unpack_fields(Function, fields)
        own = {each.name: getattr(said, each.name) for each in dataclasses.fields(said)}
        return cls(**own, blob=blob)


class Executable:
    """A function compiled for the devices of one slice.

    temporary: bytes per device that it needs while it runs.
    crossing: bytes that one gang brings to this host from other islands.
    calls_python: it has callbacks, and may fail on one device only.
    alone: nothing else may be in flight with it.
    check: its receipt says which elements are no numbers, if any are.
    gangs: which of its gangs runs now; only for those that call Python.
    seconds: what compiling took.
    """

    def __init__(
        self,
        compiled: Any,
        gangs: Gangs,
        calls_python: bool,
        seconds: float,
        check: nan_checks.Check | None = None,
    ) -> None:
        self._compiled = compiled
        self.gangs = gangs
        self.calls_python = calls_python
        self.check = check
        self.alone = calls_python or check is not None
        self.seconds = seconds
        memory = compiled.memory_analysis()
        self.temporary = int(getattr(memory, "temp_size_in_bytes", 0) or 0)
        self.crossing = 0

    def launch_through(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Call what *wrap* makes of what is called."""
        self._compiled = wrap(self._compiled)

    def renew(self, other: Executable) -> None:
        """Be what the same code was compiled to for other devices."""
        self.__dict__.update(other.__dict__)

    def __call__(self, arguments: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        """Launch it: results (perhaps not there yet), and the receipt."""
        *results, receipt = self._compiled(*arguments)
        return results, receipt


class Repeating(Executable):
    """The same, repeated by this host itself: the launch is the whole loop.

    step: the jitted function, which is called faster than what was compiled ahead of time.
    """

    def __init__(self, loop: Loop, step: Any, *how: Any) -> None:
        super().__init__(*how)
        self.alone = True
        self._loop = loop
        self._step = step

    def launch_through(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._step = wrap(self._step)

    def __call__(self, arguments: Sequence[jax.Array]) -> tuple[list[jax.Array], Laps]:
        return run(self._step, self._loop, arguments)


class Apart(Executable):
    """The arrays of a bundle, one by one: nothing is computed, and no memory taken."""

    def __init__(self) -> None:
        self.gangs = Gangs({})
        self.calls_python = self.alone = False
        self.check = None
        self.seconds = 0.0
        self.temporary = self.crossing = 0

    def launch_through(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        pass

    def __call__(self, arguments: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        return list(arguments), Passed(arguments[0])


class Passed:
    """The receipt of arrays that were made before: over when the first of them is there.

    One that was donated meanwhile is.
    """

    def __init__(self, array: Any) -> None:
        self._array = array

    def is_ready(self) -> bool:
        # Asked first: is_ready() of an array after its delete() ends the process (jaxlib 0.10.2).
        if self._array.is_deleted():
            return True
        try:
            return bool(self._array.is_ready())
        except RuntimeError:  # it was donated while it was asked
            if not self._array.is_deleted():
                raise
            return True

    def block_until_ready(self) -> Passed:
        try:
            self._array.block_until_ready()
        except RuntimeError:
            if not self._array.is_deleted():
                raise
        return self


def _callable(code: Code, wrap: jax_callbacks.Wrap) -> Callable[..., Any]:
    """The flat function; calls only from within a computation."""
    if _holds(code) and not emulated.register():
        raise RuntimeError(
            "pw.emulated() needs a C++ compiler on the host for functions that were exported "
            "where there is one: install g++ or clang++, or set CXX"
        )
    if code.kind == "callbacks":
        calling: jax_callbacks.Calling = cloudpickle.loads(code.blob)
        return calling.calling(wrap)
    called: Callable[..., Any] = jax.export.deserialize(bytearray(code.blob)).call
    return called


def _holds(code: Code) -> bool:
    """Whether it was exported with holds of ``pw.emulated`` in it."""
    return emulated.TARGET.encode() in bytes(code.blob)


def compile_code(code: Code, place: Place, output: Output) -> Executable:
    """Compile for the devices of *place*.  Raises whatever is wrong with the function."""
    if code.kind == APART:
        return Apart()
    started = time.monotonic()
    ins = [arrays.physical(*t, layout) for t, layout in _pairs(code.in_types, code.in_layouts)]
    outs = [arrays.physical(*t, layout) for t, layout in _pairs(code.out_types, code.out_layouts)]
    everywhere = place.sharding(Layout(_mesh(code, place), ()))
    gangs = Gangs(dict(zip(place.numbers, place.locals, strict=True)))
    check = nan_checks.Check.of(code.checks) if code.loop is None else None
    with arrays.wide(*(kind.dtype for kind in (*ins, *outs))):
        flat = _callable(code, output.wrap(gangs))

        def whole(*leaves: Any) -> Any:
            results = jax.tree.leaves(
                flat(*(_from_data(x, t[1]) for x, t in zip(leaves, code.in_types, strict=True)))
            )
            data = [_to_data(result) for result in results]
            _check_results(code, outs, data)
            if code.loop is not None:
                # Nothing beside the user's own results: it is measured against plain JAX.
                return data if len(data) > 1 else data[0]
            receipt = emulated.dear_zero() if _holds(code) else jnp.zeros((), jnp.uint8)
            return (*data, receipt if check is None else receipt + check.verdict([*leaves, *data]))

        whole.__name__ = whole.__qualname__ = code.name or "function"
        results = [place.sharding(kind.layout) for kind in outs]
        if code.loop is None:
            out_shardings: Any = (*results, everywhere)
        else:
            out_shardings = results if len(results) > 1 else results[0]
        jitted = jax.jit(
            whole,
            in_shardings=tuple(place.sharding(kind.layout) for kind in ins),
            out_shardings=out_shardings,
            donate_argnums=code.donated,
        )
        # With their shardings, so that the jitted function finds it compiled.
        structs = [
            jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place.sharding(kind.layout))
            for kind in ins
        ]
        lowered = jitted.lower(*structs)
        lane = place.footprint.number
        clocked = _holds(code) and emulated.keeps_clock(lowered, lane)
        compiled = lowered.compile()
    how = (compiled, gangs, code.kind == "callbacks", time.monotonic() - started, check)
    made = Executable(*how) if code.loop is None else Repeating(code.loop, jitted, *how)
    if any(jax.dtypes.itemsize_bits(kind.dtype) < 8 for kind in ins):
        # JAX's code compiled ahead of time refuses its arrays of 4 bits; jitted code does not.
        made.launch_through(lambda _: jitted)
    if clocked:
        made.launch_through(lambda call: emulated.telling(call, lane))
    if place.binding.elsewhere:
        found = dcn_collectives.of_place(compiled.as_text() or "", place)
        made.crossing = found.nbytes
        made.launch_through(lambda call: dcn_collectives.held(call, found, place.binding.home))
    return made


def _pairs(
    types: Types, layouts: tuple[Layout, ...]
) -> list[tuple[tuple[tuple[int, ...], str], Layout]]:
    return list(zip(types, layouts, strict=True))


def _mesh(code: Code, place: Place) -> tuple[tuple[str, int], ...]:
    for layout in (*code.in_layouts, *code.out_layouts):
        return layout.mesh
    return tuple(zip(place.binding.axes, place.binding.shape, strict=True))


def _from_data(leaf: Any, dtype: str) -> Any:
    if not arrays.is_key(dtype):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=arrays.key_implementation(dtype))


def _to_data(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _check_results(code: Code, outs: list[arrays.Physical], results: list[Any]) -> None:
    """Check that its results are those that its client has declared."""
    found = [(tuple(i.shape), np.dtype(i.dtype)) for i in results]
    wanted = [(kind.shape, kind.dtype) for kind in outs]
    if found != wanted:
        raise TypeError(
            f"{code.name} returns {[f'{d}{list(s)}' for s, d in found]} on the host, "
            f"but returned {[f'{d}{list(s)}' for s, d in wanted]} when it was captured; "
            "does it depend on something that differs between the two?"
        )


def _keys(code: Code, place: Place) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Under which an executable is found: its client's own, and that of all that is compiled.

    A client chooses the keys of its functions, and others share the devices: what they find of
    each other has the same content.  Two exports of one function may differ in some bytes.
    """
    cut = code.in_layouts, code.out_layouts, code.donated, place.devices
    content = hashlib.sha256(code.blob).digest(), code.kind, code.in_types, code.out_types
    return (
        (code.function, place.binding.client, *cut),
        (code.function, content, code.loop, code.checks, *cut),
    )


class Compiler:
    """The pool that compiles in the background.

    on_death: its own code failed, and somebody would wait for ever; the host must end.
    compilations: how many were done, for tests and statistics.
    notes: of what is being compiled.
    """

    def __init__(
        self,
        host: str,
        output: Output,
        on_death: Callable[[BaseException], None],
        threads: int = 2,
        notes: Notes = NO_NOTES,
    ) -> None:
        self.compilations = 0
        self._notes = notes
        self._on_death = on_death
        self._host = host
        self._output = output
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")
        self._waiting, self._counting = 0, threading.Lock()
        self._spent = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run something else that takes long, such as opening devices."""
        self._pool.submit(self._guarded, work)

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        # A pool keeps what its jobs raise to itself.
        try:
            work(*args)
        except BaseException as error:
            self._on_death(error)

    def prepare(
        self,
        code: Code,
        place: Place,
        done: Callable[[Executable | Failure, float, float], None],
        begun: Callable[[float, int], None] = lambda start, waiting: None,
    ) -> None:
        """Compile unless it is compiled; done(result, start, end) is called in a pool thread.

        start, end: monotonic seconds of the compilation; equal when there was none.
        begun: called there before a compilation, with *start* and with the number of functions that
            wait for a thread of the pool.
        """
        with self._counting:
            self._waiting += 1
        self._pool.submit(self._guarded, self._prepare, code, place, done, begun)

    def forget(self, footprint: Footprint, function: str) -> None:
        """Keep what it was compiled to for these devices no longer."""
        with footprint.compiling:
            for key in [key for key in footprint.executables if key[0] == function]:
                del footprint.executables[key]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(
        self,
        code: Code,
        place: Place,
        done: Callable[[Executable | Failure, float, float], None],
        begun: Callable[[float, int], None],
    ) -> None:
        with self._counting:
            self._waiting -= 1
        keys = _keys(code, place)
        footprint = place.footprint
        start = time.monotonic()
        with footprint.compiling:
            own, content = keys
            kept = footprint.executables
            known: Future[Executable] | None = kept.get(own) or kept.get(content)
            future = known or Future()
            if known is None:
                kept[content] = future  # and never what only its client says to be the same
            kept[own] = future
            while len(footprint.executables) > _KEPT:
                footprint.executables.pop(next(iter(footprint.executables)))
        if known is None:
            begun(start, self._waiting)
            self._compile(code, place, future)
        error = future.exception()
        if error is None:
            done(future.result(), start, time.monotonic() if known is None else start)
        else:
            with footprint.compiling:
                # A failure is not remembered: what was missing may be there next time.
                for key in keys:
                    if footprint.executables.get(key) is future:
                        del footprint.executables[key]
            done(compile_failure(code, self._host, error), start, time.monotonic())
        self._spent |= known is None
        if self._spent and not self._waiting:
            self._spent = False
            heaps.give_back()  # compilers take many times what they make

    def _compile(self, code: Code, place: Place, future: Future[Executable]) -> None:
        try:
            self.compilations += 1
            with self._notes.of(code.function, code.name, code.line):
                future.set_result(compile_code(code, place, self._output))
        except BaseException as error:
            future.set_exception(error)


def compile_failure(code: Code, host: str, error: BaseException) -> Failure:
    """Why a function cannot run on a host, with everything that is known."""
    text = str(error).strip() or type(error).__name__
    return Failure(
        "compile",
        f"{code.name or 'a compiled function'} cannot be compiled: {text.splitlines()[0]}",
        node=code.name,
        host=host,
        line=code.line,
        details="".join(traceback.format_exception(error)),
    )
