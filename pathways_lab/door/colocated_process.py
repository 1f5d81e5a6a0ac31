"""The process in which the colocated functions of one client program run.

Problem: unpickling a function runs code of its program.

How: it is a child of the program's door, has as many CPU devices as the lab has devices, with the
same numbers, and answers calls of hosts as a program answers its callbacks (:mod:`.callbacks`).
A function is read when it is called first.  Modules keep the state of functions between calls.

Rule for maintainers: nothing here speaks to the lab; it ends with the door.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pathways_lab.runtime.processes import child_process

DROP = 0
"""The number of the function that drops others."""
MESSAGE = 8000
"""Bytes of the traceback of a function that has failed."""


class Functions(dict[int, Callable[..., Any]]):
    """Functions by number, read from their folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__({DROP: self._drop})
        self._folder = folder
        self._reading = threading.Lock()

    def _drop(self, turn: Any, number: Any) -> tuple[Any, ...]:
        """Nobody calls this function any more; objects of its program may end with it."""
        self.pop(int(number), None)
        (self._folder / f"function-{number}").unlink(missing_ok=True)
        gc.collect()
        return (turn,)

    def __missing__(self, number: int) -> Callable[..., Any]:
        with self._reading:
            if number not in self:
                self[number] = Function((self._folder / f"function-{number}").read_bytes())
        return self[number]


class Function:
    """A function that a program sent.  Raises what unpickling raises."""

    def __init__(self, text: bytes) -> None:
        from pathways_lab.runtime.jax_private import unpickled_function

        found = unpickled_function(text)
        self._function, self._in_tree, self._ins, self._out_tree, self._outs = found

    def __call__(self, turn: Any, *arrays: Any) -> tuple[Any, ...]:
        """The turn, how it failed or zeros, and its results or zeros."""
        import numpy as np

        said = np.zeros(MESSAGE, np.uint8)
        try:
            results = self._results(arrays)
        except BaseException:  # an exit of the function, too, is an error of the call
            text = traceback.format_exc().encode()[-MESSAGE:]
            said[: len(text)] = np.frombuffer(text, np.uint8)
            results = [_zeros(spec) for spec in self._outs]
        return (turn, said, *results)

    def _results(self, arrays: Sequence[Any]) -> list[Any]:
        """Raises ValueError for others than were said, and what the function raises."""
        import jax

        given = [_made(each, spec) for each, spec in zip(arrays, self._ins, strict=True)]
        args, kwargs = jax.tree.unflatten(self._in_tree, given)
        leaves, tree = jax.tree.flatten(self._function(*args, **kwargs))
        if tree != self._out_tree:
            raise ValueError(f"the function has returned {tree}, and {self._out_tree} was said")
        for leaf, spec in zip(leaves, self._outs, strict=True):
            if not isinstance(leaf, jax.Array):
                raise ValueError(f"the function has returned a {type(leaf).__name__}, no array")
            said = (leaf.shape, leaf.dtype, leaf.sharding.device_set)
            wanted = (spec.shape, spec.dtype, spec.sharding.device_set)
            if said != wanted:
                raise ValueError(f"the function has returned {said}, and {wanted} was said")
        return [_sent(leaf) for leaf in leaves]


def _zeros(spec: Any) -> Any:
    import numpy as np

    from pathways_lab.door import strings

    if isinstance(spec.dtype, np.dtypes.StringDType):
        return strings.padded(np.empty(0, np.dtypes.StringDType()))
    return np.zeros(spec.shape, spec.dtype)


def _made(data: Any, spec: Any) -> Any:
    import jax
    import numpy as np

    from pathways_lab.door import strings

    if not isinstance(spec.dtype, np.dtypes.StringDType):
        return jax.device_put(data, spec.sharding)
    texts = strings.unpacked(data, spec.shape)
    shards = [
        jax.device_put(np.asarray(texts[box], texts.dtype), device)
        for device, box in spec.sharding.addressable_devices_indices_map(spec.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, shards)


def _sent(leaf: Any) -> Any:
    import numpy as np

    from pathways_lab.door import strings

    if not isinstance(leaf.dtype, np.dtypes.StringDType):
        return np.asarray(leaf)
    texts = np.empty(leaf.shape, np.dtypes.StringDType())
    for shard in leaf.addressable_shards:
        texts[shard.index] = np.asarray(shard.data)
    return strings.padded(texts)


def main() -> None:
    child_process.begin()
    told = child_process.configuration()

    import jax

    from pathways_lab.door.callbacks import Callables

    jax.config.update("jax_num_cpu_devices", told["devices"])
    functions = Functions(Path(told["folder"]))
    Callables(told["address"], bytes.fromhex(told["secret"]), functions)
    child_process.report(ready=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
