"""A device process for the tests of formations: does what it is told, one line at a time.

Every request is ``{"do": method, ...}`` and is answered with one report; a
request with ``"thread": name`` is done in a thread of its own and answered
when it is over, so that a test can look at what waits.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from pathways_lab.runtime.processes import child_process


class Worker:
    """One host.  Formations are named by their numbers."""

    def __init__(self, host: str, folder: Path) -> None:
        self.host, self.folder = host, folder
        self.joints: dict[int, Any] = {}
        self.programs: dict[tuple[int, str], tuple[Any, Any]] = {}
        self.kept: list[Any] = []
        self.spanning: Any = None

    def join(self, number: int, parts: list[Any], address: str, timeout: float = 20) -> Any:
        from pathways_lab.runtime.islands.group_member import Joint
        from pathways_lab.runtime.islands.process_group import Formation

        formation = Formation(number, "island0", 0, tuple((h, tuple(n)) for h, n in parts))
        self.joints[number] = joint = Joint(formation, self.host, address, self.folder)
        started = time.monotonic()
        joint.join(timeout)
        return time.monotonic() - started

    def join_directly(self, number: int, parts: list[Any], address: str) -> Any:
        """Without a relay between the process and its coordination service."""
        from pathways_lab.runtime.islands import group_member

        class Direct:
            lost = False

            def __init__(self, address: str, folder: Path, on_lost: Any) -> None:
                self.address = address

        group_member.Relay = Direct  # type: ignore[assignment,misc]
        return self.join(number, parts, address)

    def numbering(self, number: int) -> Any:
        """Per device of the footprint: JAX's id, its rank, whether it is ours."""
        joint = self.joints[number]
        devices = [joint.devices[owned] for owned in joint.formation.footprint]
        rows = [(d.id, d.process_index, d.process_index == joint.rank) for d in devices]
        # JAX's own order of them is the footprint's.
        assert devices == list(devices[0].client.devices())
        return rows

    def mesh(self, number: int, shape: list[int], axes: list[str], order: list[int] | None) -> Any:
        import numpy as np
        from jax.sharding import Mesh

        joint = self.joints[number]
        devices = [joint.devices[owned] for owned in joint.formation.footprint]
        if order is not None:
            devices = [devices[index] for index in order]
        return Mesh(np.array(devices).reshape(shape), axes)

    def program(
        self, number: int, name: str = "psum", shape: Any = None, axes: Any = ("d",),
        over: Any = ("d",), order: Any = None, scale: float = 1.0, size: int = 1,
    ) -> None:  # fmt: skip
        """Compile a sum over some mesh axes; device i, row-major, contributes scale * (i + 1)."""
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        joint = self.joints[number]
        shape = shape or [len(joint.formation.footprint)]
        mesh = self.mesh(number, shape, list(axes), order)
        spec = PartitionSpec(tuple(axes))
        total = jax.jit(
            jax.shard_map(
                lambda v: jax.lax.psum(v, tuple(over)), mesh=mesh, in_specs=spec,
                out_specs=PartitionSpec(tuple(a for a in axes if a not in over) or None),
            )
        )  # fmt: skip
        flat = list(mesh.devices.flat)
        ours = [
            jax.device_put(np.full((size,), scale * (i + 1), np.float32), device)
            for i, device in enumerate(flat)
            if device.process_index == joint.rank
        ]
        x = jax.make_array_from_single_device_arrays(
            (size * len(flat),), NamedSharding(mesh, spec), ours
        )
        self.programs[number, name] = (total.lower(x).compile(), x)

    def run(self, number: int, name: str = "psum", times: int = 1) -> Any:
        """Launch without waiting between, at most 8 in flight; the values on our devices."""
        total, x = self.programs[number, name]
        results = []
        for index in range(times):
            results.append(total(x))
            if index >= 8:
                results[index - 8].block_until_ready()
        seen = {float(s.data[0]) for r in results for s in r.addressable_shards}
        return sorted(seen)

    def alternate(self, number: int, names: list[str], times: int) -> Any:
        """All programs in one order from this thread, again and again; the values of each."""
        results: list[tuple[str, Any]] = []
        for _ in range(times):
            for name in names:
                total, x = self.programs[number, name]
                results.append((name, total(x)))
                if len(results) > 8:
                    results[-9][1].block_until_ready()
        seen: dict[str, set[float]] = {}
        for name, r in results:
            seen.setdefault(name, set()).update(float(s.data[0]) for s in r.addressable_shards)
        return {name: sorted(values) for name, values in seen.items()}

    def meet(self, number: int, name: str) -> None:
        self.joints[number].meet(name)

    def keep(self, number: int, name: str = "psum") -> None:
        """Hold on to an array of the formation."""
        self.kept.append(self.programs[number, name][1])

    def read_kept(self) -> Any:
        return [sorted(float(s.data[0]) for s in x.addressable_shards) for x in self.kept]

    def end(self, number: int, reason: str = "the test says so") -> Any:
        started = time.monotonic()
        self.joints[number].end(reason)
        return time.monotonic() - started

    def drop(self, number: int) -> Any:
        """Forget everything about a formation; how many threads are left."""
        from pathways_lab.runtime.islands.group_member import forget_clients

        self.joints.pop(number)
        for key in [key for key in self.programs if key[0] == number]:
            del self.programs[key]
        gc.collect()
        forget_clients()
        return self.threads()

    def state(self, number: int) -> Any:
        joint = self.joints[number]
        return [joint.state, joint.orphaned, joint.stuck]

    # --- the host's own interface ---------------------------------------------------

    def runtime(self, patience: float = 20.0) -> None:
        from pathways_lab.runtime.islands.multi_host_runtime import SpanningCpuRuntime

        self.spanning = SpanningCpuRuntime(
            self.host, self.folder, devices=4, memory=1 << 30, patience=patience
        )

    def binding(self, slice_id: int, shape: list[int], devices: list[Any]) -> Any:
        from pathways_lab.core.slices.topology import SliceBinding

        axes = ("x", "y", "z")[: len(shape)]
        owned = tuple((host, local) for host, local in devices)
        return SliceBinding(slice_id, "kernel-1", "island0", tuple(shape), axes, owned, "cpu")

    def span(self, number: int, binding: list[Any]) -> None:
        from pathways_lab.runtime.islands.process_group import Formation

        self.spanning.span(binding[0], Formation.of(self.binding(*binding), number, 0))

    def form(self, number: int, address: str) -> Any:
        """Answers when this host is in, or is not."""
        answers: queue.Queue[Any] = queue.Queue()
        self.spanning.form(number, address, lambda _, failure: answers.put(failure))
        failure = answers.get()
        return failure.message if failure else None

    def sum_on(self, binding: list[Any], meeting: str | None = None) -> Any:
        """Open a slice; device i, row-major, holds i + 1; the sums over its first axis."""
        import jax
        import numpy as np

        from pathways_lab.core.program.layout import Layout
        from pathways_lab.core.program.program import Value
        from pathways_lab.runtime import arrays

        bound = self.binding(*binding)
        place = self.spanning.open(bound)
        mesh = tuple(zip(bound.axes, bound.shape, strict=True))
        value = Value(bound.shape, "float32", 1, Layout(mesh, tuple((a,) for a in bound.axes)), 4)
        one = (1,) * len(bound.shape)
        x = arrays.join(value, place, {n: np.full(one, n + 1, np.float32) for n in place.numbers})
        if meeting is not None:
            self.spanning.meet(bound, meeting)
        out = place.sharding(Layout(mesh, tuple((a,) for a in bound.axes[1:])))
        total = jax.jit(lambda v: v.sum(axis=0), out_shardings=out)(x)
        return {
            n: np.asarray(s).ravel().tolist() for n, s in arrays.shards_of(total, place).items()
        }

    def dissolve(self, number: int) -> None:
        self.spanning.dissolve(number, "the test says so")

    def unbind(self, binding: list[Any]) -> None:
        self.spanning.close(self.binding(*binding))

    def platform(self, address: str, hosts: list[str], binding: list[Any]) -> Any:
        """What accelerators do, with JAX's CPU platform: join, open a slice, compute."""
        from pathways_lab.runtime.islands.multi_host_runtime import JoinedPlatformRuntime

        self.spanning = JoinedPlatformRuntime(self.host, hosts, address, self.folder, 1 << 30)
        return [self.spanning.count, self.sum_on(binding)]

    def threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main() -> None:
    child_process.begin()
    configuration = child_process.configuration()
    worker = Worker(configuration["host"], Path(configuration["folder"]))
    import pathways_lab.runtime.islands.group_member  # noqa: F401

    child_process.report(ready=os.getpid())

    def serve(request: dict[str, Any], tag: str | None) -> None:
        name = request.pop("do")
        started = time.monotonic()
        try:
            answer: dict[str, Any] = {"value": getattr(worker, name)(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        child_process.report(**answer, seconds=time.monotonic() - started, thread=tag)

    while True:
        request = child_process.configuration()
        tag = request.pop("thread", None)
        if tag is None:
            serve(request, None)
        else:
            threading.Thread(target=serve, args=(request, tag), daemon=True).start()


if __name__ == "__main__":
    main()
