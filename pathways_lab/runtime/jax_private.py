"""The only module that touches private JAX API.

Problem: three things that Pathways Lab cannot do without have no public door
in JAX: building a CPU client that is not *the* backend of the process, asking
whether a backend exists without creating one, and exporting without one.
Each is a few lines, and each may move with any JAX release.

Rule for maintainers: nobody else imports ``jax._src`` or ``jaxlib._jax``;
every function here has a test in ``tests/runtime/test_jax_private.py`` that
names what moved.  Prefer removing a function to adding one.

Paper: section 4.2 (the client compiles without owning devices), section 4.5
(hosts own their devices through the accelerator's own runtime).
"""

from __future__ import annotations

import contextlib
import linecache
import pathlib
import threading
import types
from collections.abc import Iterator
from typing import Any

from jax._src import source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.export import _export
from jaxlib import xla_client

from pathways_lab.core.program import Line

_OWN_FILES = str(pathlib.Path(__file__).resolve().parents[1]) + "/"


def make_cpu_client(devices: int) -> Any:
    """A CPU client with *devices* devices, beside the global backend, not in it.

    ``NPROC`` and ``XLA_FLAGS`` are read by the first client of the process.
    """
    return xla_client.make_cpu_client(asynchronous=True, num_devices=devices)


def backends_initialised() -> bool:
    """Whether this process has created a global JAX backend."""
    return bool(_xla_bridge.backends_are_initialized())


class _BridgeWithoutBackend:
    """What exporting sees instead of ``xla_bridge``: no backend, its one answer known."""

    def __init__(self, real: types.ModuleType) -> None:
        self._real = real
        self._answers = types.SimpleNamespace(serialize_with_sdy=True)

    def get_backend(self) -> types.SimpleNamespace:
        return self._answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_export_lock = threading.Lock()
_exporting = 0


@contextlib.contextmanager
def exporting_without_backend() -> Iterator[None]:
    """While active, ``jax.export`` serialises without creating a backend.

    It asks the backend one question, whether the compiler understands Shardy;
    the compilers of all supported platforms do.  May be nested, on any thread.
    """
    global _exporting
    with _export_lock:
        if _exporting == 0:
            vars(_export)["xb"] = _BridgeWithoutBackend(_xla_bridge)
        _exporting += 1
    try:
        yield
    finally:
        with _export_lock:
            _exporting -= 1
            if _exporting == 0:
                vars(_export)["xb"] = _xla_bridge


def user_line(source_info: Any) -> Line:
    """The user's line that made an equation (``eqn.source_info``).

    The innermost frame that belongs neither to JAX nor to Pathways Lab, with
    its text where the source is known (also in notebook cells); ``Line()``
    when there is none.
    """
    for frame in source_info_util.user_frames(source_info.traceback):
        if frame.file_name.startswith(_OWN_FILES):
            continue
        text = linecache.getline(frame.file_name, frame.start_line).strip()
        return Line(frame.file_name, frame.start_line, text)
    return Line()
