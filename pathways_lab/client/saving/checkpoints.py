"""Checkpoints: ``pw.save`` and ``pw.restore``.

Problem: the state of a model outlives its lab, does not pass through the client, and comes back
on other devices than it left: fewer, more, cut in another way.

How: saving is a program like any other: compiled functions
(:mod:`pathways_lab.runtime.array_files`) have every device write its part of an array, in the order
of the gangs, so that a later call may donate the array and runs meanwhile.  Restoring is the same
the other way round.  All files lie in a new folder, which takes the name of the checkpoint when
everything is there: there is the old checkpoint or the new one, never a mixture.

Rule for maintainers: nothing takes the name of a checkpoint before all hosts have written.

Paper: section 4.2 (sharded buffers); later systems' checkpoints.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pathways_lab.client.code import layouts
from pathways_lab.client.functions import scopes
from pathways_lab.client.functions.array_types import ArrayType, host_type
from pathways_lab.client.functions.jit import jit
from pathways_lab.client.lab import slice_request
from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.program.program import device_put, targets_of
from pathways_lab.client.saving.atomic_folder import Part, tidy
from pathways_lab.client.session import failures
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import PathwaysError
from pathways_lab.runtime import array_files
from pathways_lab.runtime.arrays import dtype_of

INDEX = "checkpoint.json"
_FORMAT = "pathways-lab checkpoint 1"
_NUMBERS = (bool, int, float, complex)

_write = jit(array_files.write, static_argnames=("mesh", "layout"), name="save")
_read = jit(array_files.read, static_argnames=("mesh", "layout", "shape", "dtype"), name="restore")


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
            for each in self._written:
                each.block_until_ready()
            self._part.finish()
        except BaseException as error:
            self._part.give_up()
            self._error = _unusable(self.folder, error) if isinstance(error, OSError) else error
        finally:
            self._written.clear()
            self._over.set()

    def __repr__(self) -> str:
        state = "not written" if self._error else "written" if self.done else "being written"
        return f"<checkpoint {self.folder}: {self.nbytes:,} bytes, {state}>"


def save(folder: str | os.PathLike[str], values: Any, *, wait: bool = True) -> Saving:
    """Write a pytree of handles, arrays and numbers to *folder*: a new one, or an old checkpoint.

    The hosts write, each what its devices have: the folder must be on a file system that all of
    them see under this name.  wait: False returns at once, and what is called next runs
    meanwhile, also if it donates the values; :meth:`Saving.wait` says when all is written.

    Types are kept, but for whether they are weak: as with JAX's own ways to save, what was a
    weak ``float32`` comes back as ``float32``.  The files of a process that died while it
    saved to *folder* are removed by the next one that saves there.

    Raises PathwaysError when something cannot be kept or written; an old checkpoint stays then.
    """
    _check_outside("pw.save")
    folder = slice_request.path("folder", folder).expanduser().absolute()
    tidy(folder)
    if os.path.exists(folder) and not os.path.exists(folder / INDEX):
        raise failures.failure(
            "refused",
            f"{str(folder)!r} exists and is not a checkpoint: it is not overwritten",
            "name a folder that does not exist, or an earlier checkpoint",
        )
    leaves = jax.tree.leaves_with_path(values)
    entries = [_entry(path, leaf) for path, leaf in leaves]
    part = Part(folder)
    try:
        part.begin()
        written = [
            _begin(part.path, number, entry, leaf)
            for number, (entry, (_, leaf)) in enumerate(zip(entries, leaves, strict=True))
        ]
        plain = [{"path": e.path, "shape": e.type.shape, "dtype": e.type.dtype} for e in entries]
        (part.path / INDEX).write_text(json.dumps({"format": _FORMAT, "values": plain}, indent=1))
    except BaseException as error:
        part.give_up()
        if isinstance(error, OSError | ValueError):
            raise _unusable(folder, error) from error
        raise
    nbytes = sum(entry.type.nbytes for entry in entries)
    saving = Saving(part, [each for each in written if each is not None], nbytes)
    if wait:
        saving.finish()
        return saving.wait()
    # No daemon: a script that ends meanwhile ends when it is written.
    threading.Thread(target=saving.finish, name="save").start()
    return saving


def restore(folder: str | os.PathLike[str], like: Any = None, on: Any = None) -> Any:
    """Read a checkpoint of :func:`save`: handles at once, which the hosts fill.

    like: a pytree of the same structure and types, of handles (each value comes to where its
        handle is), or of arrays, numbers and ``jax.ShapeDtypeStruct``.
    on: where all values go: a slice (a copy on every device), a sharding over ``slice.mesh``, or
        a pytree prefix of these.  Without: where ``like`` says, and else to the client, as NumPy
        arrays.

    Without ``like``: a dict of NumPy arrays by path, which read from the files what is looked at.

    Raises PathwaysError when there is no checkpoint, or another one than ``like``.
    """
    _check_outside("pw.restore")
    folder = slice_request.path("folder", folder).expanduser().absolute()
    if not os.path.exists(folder):
        tidy(folder)
    entries = _index(folder)
    if like is None:
        if on is not None:
            what = "on= says where the values of like= go, and there is no like="
            raise failures.failure("refused", what, "give a pytree of the same structure as like=")
        return {entry.path: _here(folder, n, entry) for n, entry in enumerate(entries)}
    leaves, tree = jax.tree.flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    _check_fits(folder, entries, wanted)
    targets: Sequence[Any] = [_target(leaf) for leaf in wanted.values()]
    if on is not None:
        targets = targets_of(on, like, "the target of restore")
    numbers = {entry.path: number for number, entry in enumerate(entries)}
    names: dict[Slice, Any] = {}
    restored = []
    for path, target in zip(wanted, targets, strict=True):
        number = numbers[path]
        if target is None:
            here = _here(folder, number, entries[number])
            restored.append(here.item() if isinstance(wanted[path], _NUMBERS) else here)
            continue
        place, requested = target
        if place not in names:
            names[place] = device_put(array_files.named(folder), place)
        restored.append(_there(names[place], number, entries[number], place, requested))
    return jax.tree.unflatten(tree, restored)


def _check_outside(what: str) -> None:
    if not scopes.outermost():
        raise failures.capture_failure(
            f"{what} is not a part of a program: it has the client look at files",
            "call it before or after, with the handles that the program takes or returns",
        )


# --- what a checkpoint says of its values ---------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """One value.  path: in the pytree, as JAX writes it."""

    path: str
    type: ArrayType


def _entry(path: Any, leaf: Any) -> _Entry:
    kind, name = _type(leaf), jax.tree_util.keystr(path)
    if kind is None or isinstance(leaf, jax.ShapeDtypeStruct):
        raise failures.failure(
            "refused",
            f"{name or 'the value'} is {leaf!r}: a checkpoint holds handles, arrays and numbers",
            "keep other things beside it, for example in a file of JSON",
        )
    return _Entry(name, kind)


def _type(leaf: Any) -> ArrayType | None:
    """The type of a value, or of a description of one; None for anything else."""
    if isinstance(leaf, _NUMBERS):
        leaf = np.asarray(leaf)
    if isinstance(leaf, Handle) or host_type(leaf) is not None:
        return ArrayType(tuple(leaf.shape), str(leaf.dtype), False)
    return None


def _index(folder: Path) -> list[_Entry]:
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != _FORMAT:
            raise ValueError(f"its format is {index['format']!r}, and known is {_FORMAT!r}")
        return [
            _Entry(each["path"], ArrayType(tuple(each["shape"]), each["dtype"], False))
            for each in index["values"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise failures.failure(
            "refused",
            f"{str(folder)!r} is not a checkpoint: {error}",
            "give the folder that pw.save was given",
        ) from error


def _check_fits(folder: Path, entries: Sequence[_Entry], wanted: dict[str, Any]) -> None:
    """All that is wrong at once: a model that has changed has changed in many places."""
    found = {entry.path: entry.type for entry in entries}
    wrong = [f"{path} is not in the checkpoint" for path in wanted if path not in found]
    wrong += [f"{path} is not in like=" for path in found if path not in wanted]
    for path, leaf in wanted.items():
        have, kind = found.get(path), _type(leaf)
        number = have is not None and have.shape == () and isinstance(leaf, _NUMBERS)
        if have is not None and have != kind and not number:
            wrong.append(f"{path} is {have} in the checkpoint and {kind or repr(leaf)} in like=")
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise failures.failure(
            "refused",
            f"the checkpoint {str(folder)!r} does not fit: {'; '.join(wrong[:5])}{more}",
            "pw.restore(folder), without like=, gives what is there by path",
        )


def _unusable(folder: Path, error: Exception) -> PathwaysError:
    return failures.failure(
        "refused",
        f"the checkpoint {str(folder)!r} cannot be written: {error}",
        "name a folder that can be made and has room",
    )


# --- files ----------------------------------------------------------------------------------


def _begin(part: Path, number: int, entry: _Entry, leaf: Any) -> Handle | None:
    """Make a file, for its hosts to write; what is here is written at once."""
    file = array_files.file_of(part, number)
    with jax.enable_x64(True):
        if not isinstance(leaf, Handle):
            leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            np.save(file, np.asarray(array_files.plain(leaf)))
            return None
        array_files.make(file, entry.type.shape, entry.type.dtype)
        written: Handle = _write(
            leaf, array_files.named(part), number, mesh=leaf.sharding.mesh, layout=leaf.layout
        )
        return written


def _there(
    name: Handle,
    number: int,
    entry: _Entry,
    place: Slice,
    requested: NamedSharding | PartitionSpec | None,
) -> Handle:
    """A handle on *place* that its hosts fill.  name: of the folder, on that slice."""
    kind = entry.type
    layout = layouts.layout_of(requested or PartitionSpec(), place, kind)
    at = layouts.sharding_of(layout, place)
    with jax.enable_x64(True):
        made: Handle = _read(
            name, number, mesh=at.mesh, layout=layout, shape=kind.shape, dtype=kind.dtype
        )
        return made if made.layout == layout else device_put(made, at)


def _here(folder: Path, number: int, entry: _Entry) -> Any:
    """The value as an array of the client's."""
    file = array_files.file_of(folder, number)
    try:
        stored = np.load(file, mmap_mode="r" if entry.type.nbytes else None)
    except (OSError, ValueError) as error:
        raise failures.failure("refused", f"{str(file)!r} cannot be read: {error}") from error
    if dtype_of(entry.type.dtype) == stored.dtype:
        return stored
    made = array_files.typed(jnp.asarray(stored), entry.type.dtype)
    return made if jnp.issubdtype(made.dtype, jax.dtypes.prng_key) else np.asarray(made)


def _target(leaf: Any) -> tuple[Slice, NamedSharding] | None:
    """Where a value of ``like`` is, or says that it is."""
    sharding = getattr(leaf, "sharding", None)
    place = layouts.slice_of_sharding(sharding)
    return (place, sharding) if place is not None and sharding is not None else None
