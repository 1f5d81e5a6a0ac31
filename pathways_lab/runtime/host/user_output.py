"""Output of user code on a host, with the run and the device that it came from.

Problem: ``jax.debug.print`` and ``print`` in callbacks write to the standard
output of a process without a reader, in threads of XLA.  The text belongs
under the cell that launched the gang.

How: every Python callback of a compiled function is wrapped when the function
is lowered; while it runs, its thread is labelled with the gang and the device,
and ``sys.stdout`` is a stream that looks at the label.  A function with
callbacks runs alone on its device queue, so its executable knows its gang.

Rule for maintainers: text is never lost and never printed here; text from
unlabelled threads is sent too, as run 0.

Paper: none; the single-controller view of printing.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pathways_lab.runtime.jax_callbacks import Wrap

Send = Callable[[int, int, str], None]
"""``(run, local device number or -1, text)``, called in any thread."""


class Gangs:
    """The gang that an executable with callbacks is running now.

    locals: the host's own numbers of its devices, by position in the slice.
    key: run and step; set by the lane that launches it.
    errors: local device number and exception of callbacks that raised.
    """

    def __init__(self, local_numbers: Mapping[int, int]) -> None:
        self.locals = dict(local_numbers)
        self.key: tuple[int, int] = (0, -1)
        self.errors: list[tuple[int, BaseException]] = []


class Output(io.TextIOBase):
    """A text stream that sends each line with the label of the writing thread."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send
        self._local = threading.local()

    def install(self) -> None:
        """Become ``sys.stdout``."""
        sys.stdout = self

    # --- labels -------------------------------------------------------------------

    def wrap(self, gangs: Gangs) -> Wrap:
        """For :meth:`jax_callbacks.Calling.calling`: label what callbacks of these gangs print.

        A callback that raises, or returns something else than it promised, is noted,
        and its results are zeros: an error on one device would leave the others
        waiting in the next collective, until XLA ends the process.  That device calls back
        no more in this gang, as under plain JAX, where an error ends the computation.  The client
        that launched the gang must look at its errors.
        """

        def wrap(
            callback: Callable[..., Any], numbered: bool, blanks: Callable[[], tuple[Any, ...]]
        ) -> Callable[..., Any]:
            def labelled(*args: Any) -> Any:
                device = gangs.locals.get(int(args[0]) if numbered else 0, -1)
                if any(each == device for each, _ in gangs.errors):
                    return blanks()
                before = getattr(self._local, "label", None)
                self._local.label = (gangs.key[0], device)
                try:
                    return _as_promised(callback(*(args[1:] if numbered else args)), blanks())
                except BaseException as error:  # sys.exit() too: nobody above would hear of it
                    gangs.errors.append((device, error))
                    return blanks()
                finally:
                    self._finish_line()
                    self._local.label = before

            return labelled

        return wrap

    # --- the stream ---------------------------------------------------------------

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        pending = getattr(self._local, "pending", "") + text
        lines, newline, rest = pending.rpartition("\n")
        self._local.pending = rest
        if newline:
            self._emit(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Lines leave when they end; a flushed beginning waits for its end."""

    def _finish_line(self) -> None:
        pending = getattr(self._local, "pending", "")
        self._local.pending = ""
        if pending:
            self._emit(pending)

    def _emit(self, text: str) -> None:
        run, device = getattr(self._local, "label", None) or (0, -1)
        self._send(run, device, text)


def _as_promised(results: Sequence[Any], blanks: tuple[Any, ...]) -> Sequence[Any]:
    """The results, if they are like *blanks*: JAX looks only after us, where nobody hears of it."""
    arrays = [np.asarray(result) for result in results]
    found = [_type(jax.dtypes.canonicalize_dtype(array.dtype), array.shape) for array in arrays]
    wanted = [_type(blank.dtype, blank.shape) for blank in blanks]
    if found != wanted:
        raise TypeError(
            f"a callback returned {', '.join(found) or 'nothing'}, and it was to return"
            f" {', '.join(wanted) or 'nothing'}: both must be the same"
        )
    return results


def _type(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
