"""Checkpoints: ``pw.save`` and ``pw.restore``, in Orbax's format.

Problem: the state of a model outlives its lab, does not pass through the client, comes back on
other devices than it left (fewer, more, cut in another way), and is read by other programs.

How: saving is a program like any other: compiled functions
(:mod:`pathways_lab.runtime.array_files`) have every device hand over its part of an array, in the
order of the gangs, so that a later call may donate the array.  Devices go on when the parts are
copied, hosts write, and the client asks until they have.  Restoring is the same the other way
round.  All files lie in a new folder, which takes the name of the checkpoint when everything is
there: there is the old checkpoint or the new one, never a mixture.

Rule for maintainers: nothing takes the name of a checkpoint before all hosts have written.

Paper: section 4.2 (sharded buffers); later systems' checkpoints.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pathways_lab.client.code import layouts
from pathways_lab.client.functions import scopes
from pathways_lab.client.functions.array_types import ArrayType
from pathways_lab.client.functions.jit import jit
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.program import device_put, targets_of
from pathways_lab.client.saving import tree_index
from pathways_lab.client.saving.atomic_folder import LOCK, Part, tidy
from pathways_lab.client.saving.tree_index import INDEX, NUMBERS, Entry, Index
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime import array_files, arrays, zarr_arrays

_write = jit(array_files.write, static_argnames=("mesh", "layout"), name="save")
_written = jit(array_files.written, static_argnames=("mesh",), name="saved")
_read = jit(array_files.read, static_argnames=("mesh", "layout", "shape", "dtype"), name="restore")

_WHY_OUTSIDE = "has the client look at files"
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 0.5
"""Seconds between questions whether hosts have written."""


class Saving:
    """A checkpoint that is being written, or has been.

    folder: where it is, once it is.  nbytes: of all its values.
    """

    def __init__(self, part: Part, written: list[Handle], nbytes: int) -> None:
        self.folder = part.folder
        self.nbytes = nbytes
        self._part = part
        self._written = written
        self._error: BaseException | None = None
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it is there, or could not be written."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Saving:
        """Until it is there.  timeout: seconds; TimeoutError afterwards, and it goes on.

        Raises PathwaysError when it could not be written.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self!r} took longer than {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self

    def finish(self) -> None:
        """Wait for the hosts, and give the folder its name.  Once."""
        try:
            self._wait_for_hosts()
            self._part.finish()
        except BaseException as error:
            self._part.give_up()
            self._error = _unusable(self.folder, error) if isinstance(error, OSError) else error
        finally:
            self._written.clear()
            self._over.set()

    def _wait_for_hosts(self) -> None:
        """Until every host has written all; raises what kept one from it."""
        for each in self._written:
            each.block_until_ready()
        place = array_files.placed(zarr_arrays.spec_of(self._part.path, {}))
        pause = _FIRST_PAUSE
        asked = {each.slice: each for each in self._written}
        while asked:
            told = {on: _written(h, place, mesh=h.sharding.mesh) for on, h in asked.items()}
            asked = {on: h for on, h in asked.items() if not np.asarray(told[on]).all()}
            if asked:
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)

    def __repr__(self) -> str:
        state = "not written" if self._error else "written" if self.done else "being written"
        return f"<checkpoint {self.folder}: {self.nbytes:,} bytes, {state}>"


def save(folder: str | os.PathLike[str], values: Any, *, wait: bool = True) -> Saving:
    """Write a pytree of handles, arrays and numbers to *folder*: a new one, or an old checkpoint.

    Orbax reads it, as Zarr without OCDBT.  The hosts write, each what its devices have: the
    folder must be on a file system that all of them see under this name.  wait: False returns
    at once, and what is called next runs meanwhile, also if it donates the values;
    :meth:`Saving.wait` says when all is written.

    Types are kept, but for whether they are weak: as with JAX's own ways to save, what was a
    weak ``float32`` comes back as ``float32``.  The files of a process that died while it
    saved to *folder* are removed by the next one that saves there.

    Raises PathwaysError when something cannot be kept or written; an old checkpoint stays then.
    """
    scopes.check_outside("pw.save", _WHY_OUTSIDE)
    folder = slice_request.path("folder", folder).expanduser().absolute()
    tidy(folder)
    if os.path.exists(folder) and not os.path.exists(folder / INDEX):
        raise failures.refused(
            f"{str(folder)!r} exists and is not a checkpoint: it is not overwritten",
            "name a folder that does not exist, or an earlier checkpoint",
        )
    values = tree_index.flatten(values)
    _check_kept(values)
    part = Part(folder)
    try:
        part.begin()
        tree_index.write(part.path, [entry for entry, _ in values])
        place = zarr_arrays.spec_of(part.path, {})
        written = [
            _begin(zarr_arrays.within(place, entry.name), entry.type, leaf)
            for entry, leaf in values
            if entry.type is not None
        ]
    except BaseException as error:
        part.give_up()
        if isinstance(error, OSError | ValueError):
            raise _unusable(folder, error) from error
        raise
    nbytes = sum(entry.type.nbytes for entry, _ in values if entry.type is not None)
    saving = Saving(part, [each for each in written if each is not None], nbytes)
    if wait:
        saving.finish()
        return saving.wait()
    # No daemon: a script that ends meanwhile ends when it is written.
    threading.Thread(target=saving.finish, name="save").start()
    return saving


def restore(folder: str | os.PathLike[str], like: Any = None, on: Any = None) -> Any:
    """Read a checkpoint of :func:`save` or of Orbax: handles at once, which the hosts fill.

    like: a pytree of the same structure and types, of handles (each value comes to where its
        handle is), or of arrays, numbers and ``jax.ShapeDtypeStruct``.
    on: where all values go: a slice (a copy on every device), a sharding over ``slice.mesh``, or
        a pytree prefix of these.  Without: where ``like`` says, and else to the client, as NumPy
        arrays.

    Without ``like``: NumPy arrays, numbers and text, in dicts and lists.

    Orbax by itself compresses, and keeps one database (OCDBT).  Clients and hosts read those where
    TensorStore is installed, which comes with Orbax.

    Raises PathwaysError when there is no checkpoint, or another one than ``like``.
    """
    scopes.check_outside("pw.restore", _WHY_OUTSIDE)
    folder = slice_request.path("folder", folder).expanduser().absolute()
    if not os.path.exists(folder):
        tidy(folder)
    index = tree_index.read(folder)
    if like is None:
        if on is not None:
            what = "on= says where the values of like= go, and there is no like="
            raise failures.refused(what, "give a pytree of the same structure as like=")
        found = [(entry, _here(index, entry)) for entry in index.entries]
        return tree_index.nested(
            (entry.keys, value.item() if entry.is_number else value) for entry, value in found
        )
    wanted = {entry.name: leaf for entry, leaf in tree_index.flatten(like) if not entry.is_empty}
    entries = {entry.name: entry for entry in index.entries if not entry.is_empty}
    _check_fits(folder, entries, wanted)
    targets: Sequence[Any] = [_target(leaf) for leaf in wanted.values()]
    if on is not None:
        targets = targets_of(on, like, "the target of restore")
    restored = []
    for (name, leaf), target in zip(wanted.items(), targets, strict=True):
        entry = entries[name]
        if target is not None and entry.type is not None:
            restored.append(_there(index, entry.name, entry.type, *target))
        else:
            here = _here(index, entry)
            restored.append(here.item() if isinstance(leaf, NUMBERS) else here)
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _check_kept(values: Sequence[tuple[Entry, Any]]) -> None:
    """Whether a checkpoint can hold these values, and find them again."""
    for entry, leaf in values:
        unlike = isinstance(leaf, jax.ShapeDtypeStruct) or entry.type is None
        if unlike and not entry.is_empty:
            raise failures.refused(
                f"{entry.name or 'the value'} is {leaf!r}: a checkpoint holds handles, arrays and"
                " numbers",
                "keep other things beside it, for example in a file of JSON",
            )
    names = collections.Counter(entry.name for entry, _ in values)
    for entry, _ in values:
        name = entry.name
        if names[name] > 1 or (entry.keys and not _is_folder_name(name)):
            why = "two values have it" if names[name] > 1 else "it cannot be that of a folder"
            raise failures.refused(
                f"a value would have the name {name!r} in the checkpoint, and {why}",
                "choose other keys: a name is made of the keys that lead to a value, with points"
                " between them",
            )


def _is_folder_name(name: str) -> bool:
    """Whether a folder below the one of the checkpoint may have it, beside the index."""
    parts = name.split("/")
    return not {"", ".", ".."} & {*parts} and parts[0] not in {*tree_index.FILES, LOCK}


def _check_fits(folder: Path, entries: dict[str, Entry], wanted: dict[str, Any]) -> None:
    """All that is wrong at once: a model that has changed has changed in many places."""
    wrong = [f"{name!r} is not in the checkpoint" for name in wanted if name not in entries]
    wrong += [f"{name!r} is not in like=" for name in entries if name not in wanted]
    for name, leaf in wanted.items():
        have, kind = entries.get(name), tree_index.type_of(leaf)
        if have is None or have.type == kind:
            continue
        number = have.type is not None and have.type.shape == () and isinstance(leaf, NUMBERS)
        if not number:
            found = have.type or repr(have.constant)
            wrong.append(f"{name!r} is {found} in the checkpoint and {kind or repr(leaf)} in like=")
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise failures.refused(
            f"the checkpoint {str(folder)!r} does not fit: {'; '.join(wrong[:5])}{more}",
            "pw.restore(folder), without like=, gives what is there",
        )


def _unusable(folder: Path, error: Exception) -> PathwaysError:
    return failures.refused(
        f"the checkpoint {str(folder)!r} cannot be written: {error}",
        "name a folder that can be made and has room",
    )


# --- arrays ---------------------------------------------------------------------------------


def _begin(place: dict[str, Any], kind: ArrayType, leaf: Any) -> Handle | None:
    """Make the folder of an array for its hosts to fill; what is here is written at once."""
    folder = zarr_arrays.folder_of(place)
    with jax.enable_x64(True):
        if isinstance(leaf, Handle):
            there = arrays.physical(kind.shape, kind.dtype, leaf.layout)
            zarr_arrays.make(folder, there.shape, kind.dtype, there.shard)
            written: Handle = _write(
                leaf, array_files.placed(place), mesh=leaf.sharding.mesh, layout=leaf.layout
            )
            return written
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        here = np.asarray(array_files.plain(leaf))
    zarr_arrays.make(folder, here.shape, kind.dtype, here.shape)
    zarr_arrays.write(folder, tuple((0, extent) for extent in here.shape), here)
    return None


def _there(
    index: Index,
    name: str,
    kind: ArrayType,
    place: Slice,
    requested: NamedSharding | PartitionSpec | None,
) -> Handle:
    """A handle on a slice that its hosts fill."""
    layout = layouts.layout_of(requested or PartitionSpec(), place, kind)
    at = layouts.sharding_of(layout, place)
    spec = device_put(array_files.placed(zarr_arrays.within(index.place, name)), place)
    with jax.enable_x64(True):
        made: Handle = _read(spec, mesh=at.mesh, layout=layout, shape=kind.shape, dtype=kind.dtype)
        return made if made.layout == layout else device_put(made, at)


def _here(index: Index, entry: Entry) -> Any:
    """The value as one of the client's."""
    if entry.type is None:
        return entry.constant
    kind = entry.type
    box = tuple((0, extent) for extent in kind.shape + arrays.element_of(kind.dtype).trailing)
    try:
        stored = zarr_arrays.read(zarr_arrays.within(index.place, entry.name), box)
    except (OSError, ValueError) as error:
        raise failures.refused(
            f"{entry.name!r} of {str(index.folder)!r} cannot be read: {error}"
        ) from error
    if arrays.is_key(kind.dtype):
        return array_files.typed(jnp.asarray(stored), kind.dtype)
    return stored


def _target(leaf: Any) -> tuple[Slice, NamedSharding] | None:
    """Where a value of ``like`` is, or says that it is."""
    sharding = getattr(leaf, "sharding", None)
    place = layouts.slice_of_sharding(sharding)
    return (place, sharding) if place is not None and sharding is not None else None
