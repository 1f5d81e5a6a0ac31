"""The lab as JAX's devices in this process, from any moment on.

Problem: a notebook decides for a lab when JAX was imported and used; no environment can say it
before.

How: the same door as for a program that is started with one, beside what JAX had; see
:mod:`pathways_lab.runtime.jax_backends`.

Rule for maintainers: one door for a process, since JAX has one default backend.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.lab import sharing
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import PathwaysError
from pathways_lab.door import exchange, plugin
from pathways_lab.door.exchange import Exchange
from pathways_lab.runtime import jax_backends
from pathways_lab.runtime.arrays import is_key
from pathways_lab.runtime.processes.program_environment import LAB_FILE, PLATFORM, SETTINGS

_lock = threading.Lock()
_open: OpenDoor | None = None


class OpenDoor:
    """JAX's devices in this process are a lab's: see :meth:`pathways_lab.Lab.open_door`.

    devices: all of the lab, as JAX has them.  client: the door's name as a client of the lab.
    """

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self._numbers = itertools.count(1)
        self._exchanging = threading.Lock()
        os.environ.update({n: value for n, value in SETTINGS.items() if n.startswith("IFRT_")})
        try:
            with ExitStack() as undone:
                with lab.door() as variables:
                    self._connected = plugin.connect(variables[LAB_FILE], name)
                undone.callback(self._connected.close)
                self._leave = jax_backends.enter(PLATFORM, self._connected.client)
                undone.pop_all()
        except RuntimeError as error:
            raise failures.failure("refused", f"no door opens: {error}", "see the reason") from None
        self.client = self._connected.name
        self.devices: tuple[Any, ...] = tuple(self._connected.client.devices())

    def mesh(self, place: Slice) -> Mesh:
        """A slice as a mesh of JAX's devices, with the slice's axes.

            with lab.open_door() as door:
                x = jax.device_put(x, NamedSharding(door.mesh(slice), P("x")))

        Raises PathwaysError when the slice has devices that came to the lab after the door.
        """
        known: dict[tuple[str, int], Any] = {}
        for device in self.devices:
            number = sum(host == device.host for host, _ in known)
            known[device.host, number] = device
        missing = [host for host, number in place.binding.devices if (host, number) not in known]
        if missing:
            raise failures.failure(
                "refused",
                f"slice {place.name} has devices of {', '.join(missing)}, and the door is older",
                "close the door and open another one",
            )
        grid = np.array([known[each] for each in place.binding.devices], dtype=object)
        return Mesh(grid.reshape(place.shape), place.axes)

    def array(self, tree: Any) -> Any:
        """Handles as JAX's arrays: on the same devices, cut in the same way.

            with lab.open_door() as door:
                jnp.mean(door.array(handle))           # on the lab
                optax.global_norm(door.array(params))

        tree: a handle of this lab, or a tree of them; what else is in it stays as it is.

        No bytes come to this process.  Their devices have them twice, as long as both live.
        Raises PathwaysError for keys, and for what :meth:`mesh` raises it.
        """

        def fetched(on: Slice, handles: list[Handle]) -> Sequence[Any]:
            for handle in handles:
                if is_key(handle.type.dtype):
                    raise failures.failure(
                        "refused",
                        f"{handle!r} is a random key, which does not go through the door",
                        "pw.jit(jax.random.key_data)(key) is an array that does",
                    )
            mesh = self.mesh(on)
            shardings = [NamedSharding(mesh, handle.sharding.spec) for handle in handles]
            kinds = tuple([handle.type for handle in handles])
            name = exchange.named(number := next(self._numbers))
            take = _taking(kinds, tuple(shardings), self.lab.name)
            self.lab.publish(name, handles, to=self.client)
            try:
                arrays, taken = [], 0
                while taken != number:  # an earlier attempt may have left its values
                    *arrays, told = take()
                    taken = int(told)
            except BaseException:
                with contextlib.suppress(PathwaysError):  # it may have been taken, or the lab gone
                    self.lab.unpublish(name)
                raise
            return arrays

        return self._each(tree, Handle, lambda handle: handle.slice, fetched)

    def handle(self, tree: Any) -> Any:
        """JAX's arrays on the lab as handles, which functions and programs of the lab take.

            y = jax.jit(f)(x)
            z = pw.jit(g, on=slice)(door.handle(y))

        tree: an array, or a tree of them; what else is in it stays as it is.

        No bytes come to this process.  Raises PathwaysError for arrays that are not on the lab.
        """

        def given(on: frozenset[Any], arrays: list[Any]) -> Sequence[Any]:
            if not on <= {*self.devices}:
                raise failures.failure(
                    "refused",
                    f"an array is on {', '.join(sorted(map(str, on)))}, which are not the lab's",
                    "pw.device_put(array, slice) brings it there",
                )
            number = int(_giving(self.lab.name)(*arrays))
            by, name = self.client, exchange.named(number)
            taken: list[Any] = sharing.take(self.lab.session, name, exchange.PATIENCE, by)
            return taken

        return self._each(
            tree, jax.Array, lambda array: frozenset(array.sharding.device_set), given
        )

    def _each(
        self,
        tree: Any,
        kind: type,
        place: Callable[[Any], Any],
        convert: Callable[[Any, list[Any]], Sequence[Any]],
    ) -> Any:
        """The tree with converted leaves; those of one place go together."""
        leaves, structure = jax.tree.flatten(tree)
        by_place: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, kind):
                by_place.setdefault(place(leaf), []).append(index)
        with self._exchanging:
            for on, indices in by_place.items():
                made = convert(on, [leaves[index] for index in indices])
                for index, leaf in zip(indices, made, strict=True):
                    leaves[index] = leaf
        return jax.tree.unflatten(structure, leaves)

    def close(self) -> None:
        """JAX has the devices from before again.  Arrays of the lab can be read no more."""
        global _open
        with _lock:
            if _open is not self:
                return
            _open = None
        self._leave()
        self.devices = ()
        self._connected.close()

    def __enter__(self) -> OpenDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<door of {self.lab.name}: {len(self.devices)} devices>"


def open_door(lab: Lab, name: str) -> OpenDoor:
    """See :meth:`pathways_lab.Lab.open_door`."""
    global _open
    with _lock:
        if _open is not None:
            raise failures.failure(
                "refused",
                f"JAX's devices in this process are those of {_open.lab.name} already",
                "close that door first",
            )
        _open = OpenDoor(lab, name)
        return _open


def close_of(lab: Lab) -> None:
    """Close the door of a lab, if it has one here."""
    if _open is not None and _open.lab is lab:
        _open.close()


_NUMBER = jax.ShapeDtypeStruct(exchange.NUMBER.shape, exchange.NUMBER.dtype)


@functools.lru_cache(maxsize=1024)
def _taking(
    kinds: tuple[ArrayType, ...], shardings: tuple[NamedSharding, ...], giver: str
) -> Callable[[], Any]:
    """A function that gives JAX the next values of a client, of these types, and their number."""
    target = Exchange(exchange.TAKE, giver).target
    types = [*[jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds], _NUMBER]
    call: Any = jax.ffi.ffi_call(target, types)
    whole = NamedSharding(shardings[0].mesh, PartitionSpec())
    return jax.jit(lambda: call(), out_shardings=[*shardings, whole])


@functools.cache
def _giving(other: str) -> Callable[..., Any]:
    """A function that gives arrays to a client, and says the number of that."""
    target = Exchange(exchange.GIVE, other).target
    call: Any = jax.ffi.ffi_call(target, _NUMBER)
    return jax.jit(lambda *arrays: call(*arrays))
