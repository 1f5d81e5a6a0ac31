"""The operations of XLA that devices ran between two callbacks, by JAX's profiler.

Problem: a gang is one bar, and whoever has to make it faster asks what XLA does inside of it.  The
profiler costs time while it is on, so it is on for one gang.

How: two bodies of compiled functions, each a callback under ``shard_map``.  The first one that
comes on a host starts the profiler, and no device goes on before all hosts have; the devices meet
again before the profiler is stopped and its file is read, here, with what JAX brings.  A
report is short: operations are summed up where they ran.

Rule for maintainers: one profile at a time in a process: a new one ends an older one, whose run may
have been cancelled.  Nothing is left on the host's disk.  A GPU has a plane of its own in a
profile; it was tried with one GPU, and never with TPUs.

Paper: none; the profiler is JAX's own.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

BYTES = 1 << 16
"""The size of a host's report."""

LONGEST = 120
"""Letters of an operation's name."""

Array = np.ndarray[Any, Any]

PROCESS = 1 << 11
"""The CPU client counts the devices of each process of an island from a multiple of this."""


class Row(NamedTuple):
    """An operation of a module on one device of a host: how many times, and all its seconds."""

    module: str
    operation: str
    device: int
    times: int
    seconds: float


def begin(mark: Any, *, mesh: Mesh) -> Any:
    """Body of a compiled function: hosts begin to look.  mark: another number for each profile."""

    def part(mark: Any) -> Any:
        done = io_callback(_begin, jax.ShapeDtypeStruct((1,), np.int32), mark)
        return jax.lax.psum(done, mesh.axis_names)

    return _everywhere(part, mesh, PartitionSpec())(mark)


def end(mark: Any, *, mesh: Mesh) -> Any:
    """Body of a compiled function: hosts have looked, and the first device of each has a report."""

    def part(mark: Any) -> Any:
        met = jax.lax.psum(mark, mesh.axis_names)
        return io_callback(_end, jax.ShapeDtypeStruct((BYTES,), np.uint8), mark, met)

    return _everywhere(part, mesh, PartitionSpec(mesh.axis_names))(mark)


def _everywhere(part: Any, mesh: Mesh, out: PartitionSpec) -> Any:
    return jax.shard_map(part, mesh=mesh, in_specs=PartitionSpec(), out_specs=out, check_vma=False)


def reports(found: Array) -> dict[int, tuple[list[Row], str]]:
    """The rows of each host, and what was wrong there, or ""; by the device that reported."""
    told = [bytes(part).rstrip(b"\0") for part in found.reshape(-1, BYTES)]
    read = {at: json.loads(text) for at, text in enumerate(told) if text}
    return {at: ([Row(*row) for row in each["rows"]], each["wrong"]) for at, each in read.items()}


def summed(profile: Any) -> list[Row]:
    """The operations of a ``jax.profiler.ProfileData``, those that took longest first."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for plane in profile.planes:
        number = re.search(r"^/device:\w+:(\d+)", plane.name)
        for line in plane.lines:
            for event in line.events:
                known = dict(event.stats)
                if "hlo_op" not in known:
                    continue
                device = int(number[1] if number else known.get("device_ordinal", 0)) % PROCESS
                key = str(known.get("hlo_module", "")), str(known["hlo_op"]), device
                found.setdefault(key, []).append(event.duration_ns / 1e9)
    rows = [Row(m, op[:LONGEST], d, len(s), sum(s)) for (m, op, d), s in found.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def packed(rows: Iterable[Row], wrong: str = "") -> Array:
    """As much of a report as there is room for, the first rows."""
    kept = list(rows)
    while len(text := json.dumps({"rows": kept, "wrong": wrong}).encode()) > BYTES:
        del kept[len(kept) * 3 // 4 :]
    return np.frombuffer(text.ljust(BYTES, b"\0"), np.uint8)


# --- on hosts -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Profile:
    """The profile that is on.  wrong: why it could not begin, or has no end."""

    mark: int = 0
    folder: tempfile.TemporaryDirectory[str] | None = None
    wrong: str = ""


_lock = threading.Lock()
_now = _Profile()


def _begin(mark: Any) -> Array:
    global _now
    with _lock:
        if _now.mark != int(mark):
            _stopped(_now)
            folder = tempfile.TemporaryDirectory(prefix="pathways-operations-")
            _now = _Profile(int(mark), folder)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            try:
                jax.profiler.start_trace(folder.name, profiler_options=options)
            except RuntimeError as error:
                _now.wrong = f"the profiler did not start: {error}"
    return np.ones(1, np.int32)


def _end(mark: Any, met: Any) -> Array:
    with _lock:
        if _now.mark != int(mark):
            return packed([], "another profile began on this host meanwhile")
        if _now.folder is None:
            return np.zeros(BYTES, np.uint8)  # another device of this host has the report
        rows = _stopped(_now)
        return packed(rows, _now.wrong)


def _stopped(profile: _Profile) -> list[Row]:
    """End a profile, if it is on, and sum it up."""
    folder, profile.folder = profile.folder, None
    if folder is None:
        return []
    with folder:
        if profile.wrong:
            return []
        jax.profiler.stop_trace()
        files = list(Path(folder.name).rglob("*.xplane.pb"))
        found = [summed(jax.profiler.ProfileData.from_file(str(file))) for file in files]
        return [row for rows in found for row in rows]
