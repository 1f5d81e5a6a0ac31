"""Compiled functions: ``pw.jit``.

Problem: users keep JAX's names and meanings and change only where things run.
A :class:`CompiledFunction` is called like the Python function; depending on
where the call stands (:mod:`~pathways_lab.client.functions.scopes`) it is a run of one
node, a node of the program being captured, or part of another compiled
function.

Rule for maintainers: a repeated call finds its :class:`Body` in one lookup and
must neither trace nor lower; one of handles only does not look for it even.

Paper: section 3 (compiled functions), section 4.2.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, overload

import jax

from pathways_lab.client.code import layouts, source_lines
from pathways_lab.client.functions import array_types, scopes
from pathways_lab.client.functions.arguments import (
    Names,
    Numbers,
    Roles,
    Split,
    broadcast,
    is_placement,
    options_of,
)
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.flat import FlatFunction
from pathways_lab.client.functions.traced_function import Body
from pathways_lab.client.lab import tags
from pathways_lab.client.lab.devices import HostSlice, OnSlices, Slice
from pathways_lab.client.lab.run_options import Running
from pathways_lab.client.program.graph import Prepared
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.runtime.jax_private import trace_context


@dataclass(slots=True, eq=False)
class BoundCall:
    """A call with its arguments: leaves are handles, stand-ins and host arrays."""

    function: CompiledFunction
    body: Body
    leaves: tuple[Any, ...]

    @property
    def slice(self) -> Slice | None:
        return self.function.slice


class CompiledFunction:
    """A Python function that runs as one sharded computation on one slice.

    slice: where it runs; None when the arguments decide.
    has_static: values of some arguments are part of the code.
    repeats: what the outermost scope keeps of calls, by what they look like.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        on: Slice | None = None,
        in_shardings: Any = None,
        out_shardings: Any = None,
        static_argnums: Numbers = None,
        static_argnames: Names = None,
        donate_argnums: Numbers = None,
        donate_argnames: Names = None,
        kwargs_sharding: Any = None,
        name: str | None = None,
        keep: bool = False,
        window: float | None = None,
        priority: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"pw.jit takes a function, got {type(function).__name__}")
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        if isinstance(in_shardings, list):
            in_shardings = tuple(in_shardings)
        self._in, self._out, self._kwargs = in_shardings, out_shardings, kwargs_sharding
        self._static = (static_argnums, static_argnames)
        self.has_static = self._static != (None, None)
        self._roles = Roles(
            function, static_argnums, static_argnames, donate_argnums, donate_argnames
        )
        self.tag = tags.Tag.of(priority, data)
        self.slice = _inferred(on, in_shardings, out_shardings, self.name)
        self._bodies: dict[Any, Body] = {}
        self.repeats = OnSlices[Any, Any]()
        self._running = Running.of(keep, window)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        scope = scopes.current()
        if isinstance(scope, scopes.Body):
            return self.as_jit(*args, **kwargs)
        if self.tag is tags.NOTHING:
            return scope.call(self, args, kwargs)
        with tags.beneath(self.tag):
            return scope.call(self, args, kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
        """Flatten the arguments and find (or make) the body for their types."""
        split = self._roles.split(args, kwargs)
        leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        kinds = tuple(
            [leaf.type if type(leaf) is Handle else array_types.host_type(leaf) for leaf in leaves]
        )
        key = (tree, kinds, split.static_key, trace_context())
        try:
            body = self._bodies.get(key)
        except TypeError:
            body = None
        if body is None:
            body = self._bodies[key] = self._trace(split, tree, leaves, kinds)
        return BoundCall(self, body, tuple(leaves))

    def _trace(
        self, split: Split, tree: Any, leaves: list[Any], kinds: Sequence[ArrayType | None]
    ) -> Body:
        labels = self._roles.labels(split)
        for leaf, kind, label in zip(leaves, kinds, labels, strict=True):
            if kind is None:
                raise array_types.no_array(leaf, f"{label} of {self.name!r}")
        requested = broadcast(self._in, split.args, "in_shardings")
        requested += [self._kwargs] * len(jax.tree.leaves(split.kwargs))
        return Body(
            FlatFunction(self.function, tree, split.static, self.name),
            self.name,
            [kind for kind in kinds if kind is not None],
            requested=requested,
            out_prefix=self._out,
            donated=self._roles.donated(split),
            labels=labels,
            line=source_lines.of_function(self.function),
            owner=self.function,
            running=self._running,
        )

    def elsewhere(self, on: Slice | None, name: str) -> CompiledFunction:
        """The same function on another slice, by another name; what is traced is traced once."""
        other = object.__new__(CompiledFunction)
        vars(other).update(vars(self))
        other.slice, other.name, other.repeats = on, name, OnSlices()
        return other

    @property
    def ready(self) -> tuple[Prepared, ...]:
        """The programs of one call that calls of it have come to."""
        bodies = tuple(self._bodies.values())
        return tuple(prepared for body in bodies for prepared in body.prepared.values())

    @functools.cached_property
    def as_jit(self) -> Callable[..., Any]:
        """The same as ``jax.jit`` sees it: inside the body of another compiled function."""
        return _plain_jit(self.function, *self._static)

    @functools.cached_property
    def on_slice(self) -> Callable[..., Any]:
        """The same as a part of what JAX compiles for the devices of the slice."""
        place = self.slice
        if place is None:
            return self.as_jit

        @functools.wraps(self.function)
        def there(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = jax.tree.map(place.holding, (args, kwargs))
            return self.function(*args, **kwargs)

        return _plain_jit(there, *self._static)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        where = f" on {self.slice.name}" if self.slice else ""
        return f"<compiled function {self.name}{where}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # In a device process there are no slices to choose from: plain JAX.
        return _plain_jit, (self.function, *self._static)


def _plain_jit(
    function: Callable[..., Any], static_argnums: Numbers, static_argnames: Names
) -> Callable[..., Any]:
    return jax.jit(function, static_argnums=static_argnums, static_argnames=static_argnames)


def _inferred(
    on: Slice | HostSlice | None, in_shardings: Any, out_shardings: Any, name: str
) -> Slice | None:
    """The slice that ``on=`` and the shardings agree on."""
    if isinstance(on, HostSlice):
        return None  # inside of the body of another one, which is there already
    if on is not None and not isinstance(on, Slice):
        raise failures.refused(
            f"on={on!r} of {name!r} is not a slice",
            "on=lab.slice(...), or on=pw.make_virtual_device_set().add_slice(tpu_devices=n)",
        )
    found: dict[Slice, None] = {} if on is None else {on: None}
    for what, given in (("in_shardings", in_shardings), ("out_shardings", out_shardings)):
        for entry in jax.tree.leaves(given, is_leaf=is_placement):
            requested = layouts.check_requested(entry, f"an entry of {what}")
            owner = layouts.slice_of_sharding(requested)
            if owner is not None:
                found[owner] = None
    if len(found) > 1:
        names = " and ".join(owner.name for owner in found)
        raise failures.refused(
            f"compiled function {name!r} names slices {names}, and it runs on one slice",
            "use shardings over the mesh of one slice; make one function per slice",
        )
    return next(iter(found), None)


class Options(TypedDict, total=False):
    """See :func:`jit`."""

    on: Slice | None
    in_shardings: Any
    out_shardings: Any
    static_argnums: Numbers
    static_argnames: Names
    donate_argnums: Numbers
    donate_argnames: Names
    name: str | None
    keep: bool
    window: float | None
    priority: int | None
    data: Mapping[str, Any] | None


@overload
def jit(
    function: None = None, /, **options: Unpack[Options]
) -> Callable[[Callable[..., Any]], CompiledFunction]: ...
@overload
def jit(function: Callable[..., Any], /, **options: Unpack[Options]) -> CompiledFunction: ...
@options_of(CompiledFunction, "kwargs_sharding")
def jit(function: Callable[..., Any] | None = None, /, **options: Unpack[Options]) -> Any:
    """Compile *function* into one sharded computation on a slice.

    on: the slice; may be left out when a sharding names its mesh, or when the
        arguments are handles on one slice.
    in_shardings: a pytree prefix of the positional arguments; entries are
        ``PartitionSpec``, ``NamedSharding`` over ``slice.mesh``, or None (where
        the argument is; a host array goes where the code wants it).
    out_shardings: the same for the results; None lets Shardy's propagation decide.
    static_argnums, static_argnames, donate_argnums, donate_argnames: as in ``jax.jit``.
    name: what the function is called in views and errors.
    keep: a run that has not begun ends when the last handle to its results is gone; True: it
        goes on, for what it does beside its results.  So do all that call back into Python.
    window: seconds of other work that may lie before its gang on the devices when that gets its
        place; 0: none.  The less, the less it holds up others (``lab.window`` has the rule).
    priority, data: of calls outside of programs, as of :func:`pathways_lab.program`.

    Arguments elsewhere are moved and resharded automatically.  A call returns a
    pytree of handles at once.  Also usable as ``@pw.jit(on=s)``.  JAX's settings of
    types, precision and promotion (``jax.enable_x64``, ...) count where a call stands, as in
    ``jax.jit``; those that look at values (``jax.debug_nans``) do nothing: values come later,
    and ``lab.check_nans()`` looks at them.

    Raises PathwaysError for shardings that name no slice or several.
    """
    if function is None:
        return lambda given: CompiledFunction(given, **options)
    return CompiledFunction(function, **options)
