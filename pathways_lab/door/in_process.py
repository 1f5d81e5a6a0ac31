"""The lab as JAX's devices in this process, from any moment on.

Problem: a notebook decides for a lab when JAX was imported and used; no environment can say it
before.  And most notebooks never need more of JAX than their lab compiles.

How: the same door as for a program that is started with one, beside what JAX had; see
:mod:`pathways_lab.runtime.jax_backends`.  It opens when JAX first meets a value or a device of the
lab (:mod:`pathways_lab.client.session.in_jax`), and closes with the lab.

Handles of the lab are arrays for JAX: each gets one at its first use (:mod:`.exchange`).

Rule for maintainers: one door for a process.  When it closes, nothing keeps a device or an array of
JAX's client.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import jit
from pathways_lab.client.lab import hooks, sharing
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session import failures, in_jax
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import Failure, PathwaysError
from pathways_lab.door import exchange, plugin
from pathways_lab.door.exchange import Exchange
from pathways_lab.runtime import jax_backends
from pathways_lab.runtime.arrays import is_key, key_implementation
from pathways_lab.runtime.devices import mesh_of, spec_of
from pathways_lab.runtime.processes.program_environment import LAB_FILE, PLATFORM, SETTINGS

_lock = threading.Lock()


@dataclass(slots=True, eq=False, weakref_slot=True)
class _InJax:
    """JAX's array of a handle, by a door.  array: None when that is closed."""

    door: OpenDoor
    array: Any


class OpenDoor:
    """JAX has the devices of a lab in this process: see :meth:`pathways_lab.Lab.open_door`.

    devices: all of the lab, as JAX has them.  client: the door's name as a client of the lab.
    slice_index: whether devices have the number of their island.
    """

    def __init__(self, lab: Lab, name: str, slice_index: bool) -> None:
        self.lab, self.slice_index = lab, slice_index
        self._back: Callable[[], None] | None = None
        self._stays = False
        self._numbers = itertools.count(1)
        self._exchanging = threading.Lock()
        self._kept: weakref.WeakSet[_InJax] = weakref.WeakSet()
        os.environ.update({n: value for n, value in SETTINGS.items() if n.startswith("IFRT_")})
        try:
            with ExitStack() as undone:
                with lab.door() as variables:
                    self._connected = plugin.connect(variables[LAB_FILE], name, slice_index)
                undone.callback(self._connected.close)
                self._leave = jax_backends.enter(PLATFORM, self._connected.client)
                undone.pop_all()
        except RuntimeError as error:
            raise failures.refused(f"no door opens: {error}", "see the reason") from None
        self.client = self._connected.name
        self.devices: tuple[Any, ...] = tuple(self._connected.client.devices())
        self._own = frozenset(self.devices)
        self._at: dict[tuple[str, int], Any] = {}
        of_host: dict[str, Any] = collections.defaultdict(itertools.count)
        for device in self.devices:
            self._at[device.host, next(of_host[device.host])] = device
        self._slices: weakref.WeakValueDictionary[Mesh, Slice] = weakref.WeakValueDictionary()
        self._meshes: weakref.WeakKeyDictionary[Slice, dict[Any, Mesh]] = (
            weakref.WeakKeyDictionary()
        )
        self._taking = functools.lru_cache(maxsize=1024)(functools.partial(_taking, lab.name))

    def lead(self, stays: bool) -> None:
        """Make the devices those that JAX takes where nothing names others: ``jax.devices()``.

        stays: the door was open before.  Raises PathwaysError when they are.
        """
        if self._back is not None:
            raise failures.refused(
                f"jax.devices() in this process are those of {self.lab.name} already",
                "close that door first",
            )
        self._back, self._stays = jax_backends.prefer(self._connected.client), stays

    def device(self, place: Slice, number: int) -> Any:
        """JAX's device for one of a slice's."""
        return self._mesh(place, place.axis_sizes).devices.flat[number]

    def mesh_of(self, place: Slice) -> Mesh | None:
        """A slice of the lab as a mesh of JAX's devices; None for other slices, and for those
        with devices that are newer than the door."""
        known = place.owner is self.lab and all(at in self._at for at in place.binding.devices)
        return self._mesh(place, place.axis_sizes) if known else None

    def _mesh(self, place: Slice, axes: tuple[tuple[str, int], ...]) -> Mesh:
        known = self._meshes.setdefault(place, {})
        key = place.binding.devices, axes
        if key not in known:
            known[key] = self._made(place, axes)
        return known[key]

    def _made(self, place: Slice, axes: tuple[tuple[str, int], ...]) -> Mesh:
        missing = [at[0] for at in place.binding.devices if at not in self._at]
        if missing:
            raise failures.refused(
                f"slice {place.name} has devices of {', '.join(missing)}, and the door is older",
                "lab.open_door().close(): the next use opens another one",
            )
        mesh = mesh_of([self._at[each] for each in place.binding.devices], axes)
        self._slices[mesh] = place
        return mesh

    def slice_of(self, mesh: Mesh) -> Slice | None:
        """The slice of which it is JAX's mesh, if it is one."""
        return self._slices.get(mesh)

    def array(self, tree: Any) -> Any:
        """Handles as JAX's arrays: on the same devices, cut in the same way.

            jnp.mean(handle)                           # JAX takes handles; this is on the lab
            params = door.array(params)                # hundreds of them in one message

        tree: a handle of this lab, or a tree of them; what else is in it stays as it is.

        No bytes come to this process.  Their devices have them twice, as long as the handle lives.
        Raises PathwaysError for handles that have failed, or are on devices that are newer than
        the door.
        """
        leaves, structure = jax.tree.flatten(tree)
        where = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Handle)]
        for number, array in zip(where, in_jax.arrays([leaves[n] for n in where]), strict=True):
            leaves[number] = array
        return jax.tree.unflatten(structure, leaves)

    def knows(self, handle: Handle) -> bool:
        """Whether it is a handle of this lab."""
        return handle.session is self.lab.session

    def sharding(self, handle: Handle) -> NamedSharding | None:
        """How JAX's array of a handle is cut; None on devices that are newer than the door."""
        known = all(at in self._at for at in handle.slice.binding.devices)
        return self._sharding(handle) if known else None

    def _sharding(self, handle: Handle) -> NamedSharding:
        return NamedSharding(self._mesh(handle.slice, handle.layout.mesh), spec_of(handle.layout))

    def arrays(self, handles: Sequence[Handle]) -> list[Any]:
        """JAX's arrays of handles, which keep them as long as this door is open."""
        found: dict[int, Any] = {}
        missing: dict[Slice, dict[int, Handle]] = {}
        for handle in handles:
            found[id(handle)] = array = self._known(handle)
            if array is None:
                missing.setdefault(handle.slice, {})[id(handle)] = handle
        # A call that is being traced around this one would else take it for a part of its own.
        with self._exchanging, jax.ensure_compile_time_eval():
            for them in missing.values():
                made = self._fetched([*them.values()])
                for (number, handle), array in zip(them.items(), made, strict=True):
                    found[number] = array
                    self._kept.add(kept := _InJax(self, array))
                    handle.in_jax = kept
        return [found[id(handle)] for handle in handles]

    def _known(self, handle: Handle) -> Any:
        kept: _InJax | None = handle.in_jax
        if kept is None or kept.door is not self or kept.array.is_deleted():
            return None
        return kept.array

    def _fetched(self, handles: Sequence[Handle]) -> Sequence[Any]:
        """In one exchange; keys as what they are made of."""
        of = [handle.type.dtype for handle in handles]
        handles = [
            _key_data(handle) if is_key(dtype) else handle
            for handle, dtype in zip(handles, of, strict=True)
        ]
        kinds = tuple([handle.type for handle in handles])
        shardings = tuple(map(self._sharding, handles))
        name = exchange.named(number := next(self._numbers))
        take = self._taking(kinds, shardings)
        sharing.give(self.lab.session, name, list(handles), self.client, self._not_given)
        arrays = take(np.int32(number))
        return [
            jax.random.wrap_key_data(array, impl=key_implementation(dtype))
            if is_key(dtype)
            else jax_backends.weakened(array)
            if handle.weak_type
            else array
            for array, handle, dtype in zip(arrays, handles, of, strict=True)
        ]

    def handle(self, tree: Any) -> Any:
        """JAX's arrays on the lab as handles of their own, also for when the door is closed.

            y = jax.jit(f)(x)
            z = pw.jit(g, on=slice)(door.handle(y))

        tree: an array, or a tree of them; what else is in it stays as it is, random keys too.

        No bytes come to this process.  Raises PathwaysError for arrays that are not on the lab.
        """
        leaves, structure = jax.tree.flatten(tree)
        for leaf in leaves:
            if _is_jax(leaf) and not self.holds(leaf):
                on = ", ".join(sorted(map(str, leaf.sharding.device_set)))
                raise failures.refused(
                    f"an array is on {on}, which are not the lab's",
                    "pw.device_put(array, slice) brings it there",
                )
        return jax.tree.unflatten(structure, self.handles(leaves))

    def holds(self, value: Any) -> bool:
        """Whether it is an array of JAX's own on the lab's devices, and no random key."""
        return _is_jax(value) and bool(value.sharding.device_set <= self._own)

    def handles(self, leaves: list[Any]) -> list[Any]:
        """Handles in place of JAX's arrays on the lab; the same list where there is none."""
        by_place: dict[frozenset[Any], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if self.holds(leaf):
                on = frozenset(leaf.sharding.device_set)
                by_place.setdefault(on, []).append(index)
        made = list(leaves) if by_place else leaves
        for indices in by_place.values():
            given = self._given([leaves[index] for index in indices])
            for index, handle in zip(indices, given, strict=True):
                made[index] = handle
        return made

    def _given(self, arrays: Sequence[Any]) -> Sequence[Handle]:
        number = next(self._numbers)
        told = _giving(self.lab.name)(np.int32(number), *arrays)
        by, name = self.client, exchange.named(number)
        try:
            made: list[Handle] = sharing.take(self.lab.session, name, exchange.PATIENCE, by)
        except PathwaysError:
            int(told)  # raises what kept the door from giving
            raise
        return made

    @staticmethod
    def _not_given(why: Failure) -> None:
        """The door waits for a while; whoever reads its arrays is told what they lack."""

    def close(self) -> None:
        """JAX has the devices of before again, and arrays on the lab are deleted.

        The next use of a handle or a slice by JAX opens another door.
        """
        with _lock:
            self._end()

    def _step_back(self) -> None:
        back, self._back = self._back, None
        if back is not None:
            back()

    def _end(self) -> None:
        if in_jax.door is not self:
            return
        in_jax.door = None
        self._step_back()
        for each in self._kept:
            each.array = None
        for array in self._connected.client.live_arrays():
            array.delete()
        self._leave()
        # JAX's client goes with the last of its devices.
        self.devices, self._own = (), frozenset()
        self._at.clear()
        self._slices.clear()
        self._meshes.clear()
        self._taking.cache_clear()
        self._connected.close()

    def __enter__(self) -> OpenDoor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stays:
            self._step_back()
        else:
            self.close()

    def __repr__(self) -> str:
        return f"<door of {self.lab.name}: {len(self.devices)} devices>"


def open_door(lab: Lab, name: str = "", slice_index: bool = False, lead: bool = False) -> OpenDoor:
    """The door of this process to a lab, which opens when there is none.

    name, slice_index: see :meth:`pathways_lab.Lab.open_door`.  lead: it is asked for there.
    Raises PathwaysError when it is open to another lab, or without these.
    """
    with _lock:
        door = in_jax.door
        if stays := isinstance(door, OpenDoor):
            _check(door, lab, name, slice_index)
        else:
            lab.session.connection.check()
            door = in_jax.door = OpenDoor(lab, name, slice_index)
        if lead:
            door.lead(stays)
        return door


def _check(door: OpenDoor, lab: Lab, name: str, slice_index: bool) -> None:
    if door.lab is not lab:
        raise failures.refused(
            f"JAX has the devices of {door.lab.name} in this process, and takes nothing of another"
            " lab",
            "close that lab first; jax.numpy.asarray(handle.result()) is an array of a value",
        )
    if name not in ("", door.client) or slice_index > door.slice_index:
        raise failures.refused(
            f"JAX has the devices of {lab.name} already, by a door that is called {door.client}",
            "lab.open_door().close() closes it, and deletes JAX's arrays there",
        )


def close_of(lab: Lab) -> None:
    """Close the door of a lab, if it has one here."""
    if in_jax.door is not None and in_jax.door.lab is lab:
        in_jax.door.close()


def _is_jax(leaf: Any) -> bool:
    """Whether it is an array of JAX's own, and no random key, which goes by its bytes."""
    return type(leaf) is not Handle and isinstance(leaf, jax.Array) and not is_key(str(leaf.dtype))


_key_data = jit(jax.random.key_data)
_NUMBER = jax.ShapeDtypeStruct(exchange.NUMBER.shape, exchange.NUMBER.dtype)


def _taking(
    giver: str, kinds: tuple[ArrayType, ...], shardings: tuple[NamedSharding, ...]
) -> Callable[[np.int32], Any]:
    """A function that gives JAX the values of an exchange, by its number, of these types."""
    target = Exchange(exchange.TAKE, giver).target
    types = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
    call: Any = jax.ffi.ffi_call(target, types)
    whole = NamedSharding(shardings[0].mesh, PartitionSpec())
    return jax.jit(lambda number: call(number), in_shardings=whole, out_shardings=list(shardings))


@functools.cache
def _giving(other: str) -> Callable[..., Any]:
    """A function that gives arrays to a client, after the number of the exchange."""
    target = Exchange(exchange.GIVE, other).target
    call: Any = jax.ffi.ffi_call(target, _NUMBER)
    return jax.jit(lambda number, *arrays: call(number, *arrays))


hooks.open_door = open_door
