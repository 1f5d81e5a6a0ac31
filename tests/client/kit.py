"""Slices without a lab, and a lab without a cluster, for tests of the client.

:class:`FakeLab` speaks the real wire protocol on real sockets, in this process:
a control plane that runs every plan at once (or when told to), with JAX's own ``device_put``
for transfers.  All labs of the process compute on one CPU client: JAX never lets go of a client
that something was compiled for, nor of its threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_lab.client.lab.devices import Slice
from pathways_lab.client.session import call_batching, connection
from pathways_lab.client.session.connection import Connection
from pathways_lab.client.session.session import Session
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.folding import Folded, laid_out
from pathways_lab.core.program.layout import Layout, boxes
from pathways_lab.core.program.program import Call, Plan, Value
from pathways_lab.core.scheduling.policies import INITIAL
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.arrays import element_of, index
from pathways_lab.runtime.data_messages import Put
from pathways_lab.transport.auth import key_of
from pathways_lab.transport.codec import pack, unpack, unpack_fields
from pathways_lab.transport.link import Link, LinkClosed
from pathways_lab.transport.reactor import Reactor
from tests.client.edge_kit import Edge

KEY = b"k" * 32
DEVICES_PER_HOST = 2
_numbers = iter(range(1, 1 << 30))


@functools.cache
def local_devices() -> list[Any]:
    """Eight devices, the same for all tests of this process."""
    return list(jax_private.make_cpu_client(8).local_devices())


@functools.lru_cache(maxsize=256)
def _exported(
    blob: bytes, ins: tuple[NamedSharding, ...], outs: tuple[NamedSharding, ...]
) -> Callable[..., list[Any]]:
    """One content is compiled once, whichever lab it came to: it calls nothing of a test's."""
    return _jitted(jax.export.deserialize(bytearray(blob)).call, list(ins), list(outs))


def _jitted(
    function: Callable[..., Any], ins: list[NamedSharding], outs: list[NamedSharding]
) -> Callable[..., list[Any]]:
    made: Callable[..., list[Any]] = jax.jit(
        lambda *arguments: list(function(*arguments)), in_shardings=ins, out_shardings=outs
    )
    return made


def binding(
    shape: tuple[int, ...], axes: tuple[str, ...], number: int, island: str = "island0"
) -> SliceBinding:
    """Two devices per host, as many hosts as it takes."""
    devices = tuple(
        (f"{island}/host{d // DEVICES_PER_HOST}", d % DEVICES_PER_HOST)
        for d in range(math.prod(shape))
    )
    return SliceBinding(number, "kernel-1", island, shape, axes, devices, "cpu")


def a_slice(*shape: int, axes: tuple[str, ...] | None = None, island: str = "island0") -> Slice:
    """A slice without a lab: for everything that happens before a run."""
    names = axes or ("x", "y", "z")[: len(shape)]
    return Slice(binding(shape, names, 1 << 32 | next(_numbers), island))


def _arrays(value: Value, held: Any) -> list[Any]:
    """The arrays of a bundle, or the one of another value."""
    return held if value.leaves else [held]


class FakeLab:
    """A lab of one process.  held: runs wait for :meth:`release`.

    messages: ``(op, fields)`` from the client, in order.  fetches: questions to hosts.
    failing: name of a function whose runs fail.  declared: uploads that are not dropped.
    skipped: nodes whose condition did not hold.
    kept: buffers that others have.  published: by name; the client may take its own.
    """

    def __init__(self, hosts: int = 4) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.held = False
        self.failing = ""
        self.kept: set[int] = set()
        self.skipped: list[str] = []
        self.published: dict[str, tuple[list[int], bytes]] = {}
        self.window = 0.1
        self.edge = Edge()
        self._waiting: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pw-fake-", dir="/tmp")
        self._devices = local_devices()
        self._bindings: dict[int, SliceBinding] = {}
        self._blobs: dict[str, Any] = {}
        self._compiled: dict[tuple[str, int], tuple[Any, list[NamedSharding]]] = {}
        self._fields: dict[tuple[str, int], dict[str, Any]] = {}
        self._plans: dict[str, Plan] = {}
        self.arrays: dict[int, Any] = {}
        self._uploads: dict[int, tuple[dict[str, Any], dict[int, Any]]] = {}
        self._gone: set[int] = set()
        self.declared: set[int] = set()
        self._fetches: list[tuple[Link, dict[str, Any]]] = []
        self._data_links: set[Link] = set()
        self.fetches = 0
        self._link: Link | None = None
        self._control = Reactor("fake-control", self._message, lambda *_: None)
        self._control.start()
        folder = Path(self._folder.name)
        self._data = self._control.listen(f"unix:{folder}/data", KEY, {"role": "host", "name": "h"})
        hello = {
            "role": "control", "client": "kernel-1", "number": 1, "clock": 0.0,
            "data_key": key_of(KEY, 1), "emulated": False, "topology": self._topology(hosts),
            "policy": {"policy": pack(INITIAL), "name": "ProportionalShare", "owner": ""},
        }  # fmt: skip
        self.address = self._control.listen(f"unix:{folder}/control", KEY, hello)
        self.connection = Connection(self.address, KEY)
        self.session = Session(self.connection)

    def _topology(self, hosts: int) -> dict[str, Any]:
        return {
            "down": [],
            "islands": [
                {
                    "name": island,
                    "hosts": [
                        {
                            "name": f"{island}/host{n}", "pid": 1, "worker_pid": 1, "kind": "cpu",
                            "devices": DEVICES_PER_HOST, "memory": 1 << 30,
                            "data_address": self._data, "emulated": False,
                        }
                        for n in range(hosts)
                    ],
                }
                for island in ("island0", "island1")
            ],
            "slices": [],
            "published": dict.fromkeys(self.published, "bob"),
            "clients": ["kernel-1", "bob"],
        }  # fmt: skip

    # --- what tests do with it ----------------------------------------------------------

    def slice(
        self, *shape: int, axes: tuple[str, ...] | None = None, island: str = "island0"
    ) -> Slice:
        names = axes or ("x", "y", "z")[: len(shape)]
        return Slice(
            self.connection.questions.request_slice(SliceRequest(shape, names, island)), self
        )

    def release_slice(self, slice_id: int) -> None:
        self.connection.release_slice(slice_id)

    def rebind_slice(self, slice_id: int, island: str | None) -> SliceBinding:
        return self.connection.questions.rebind_slice(slice_id, island)

    def slice_state(self, slice_id: int) -> str:
        return "bound"

    def count(self, op: str) -> int:
        """Messages of this kind that the client has sent."""
        return sum(name == op for name, _ in self.messages)

    def of(self, op: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.messages if name == op]

    def release(self) -> None:
        """Let the held runs go, in order."""
        done = threading.Event()

        def go() -> None:
            waiting, self._waiting = self._waiting, []
            for run in waiting:
                run()
            done.set()

        self._control.call_soon(go)
        assert done.wait(30)

    def settle(self) -> None:
        """Wait until everything that was sent has been handled."""
        done = threading.Event()
        self._control.call_later(0.05, done.set)
        assert done.wait(30)

    def say(self, op: str, fields: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """A message to the client."""
        assert self._link is not None
        with contextlib.suppress(LinkClosed):
            self._link.send(op, fields, buffers)

    def close(self) -> None:
        self.connection.close()
        self._control.close()
        self._folder.cleanup()
        assert not self.edge.wrong, self.edge.wrong

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the control plane ----------------------------------------------------------------

    def _message(
        self, link: Link, op: str, fields: dict[str, Any], buffers: list[memoryview]
    ) -> None:
        if op in ("put", "fetch"):
            self._data_links.add(link)
            self.fetches += op == "fetch"
            getattr(self, f"_on_{op}")(link, fields, buffers)
            return
        self._link = link
        self.messages.append((op, fields))
        self.edge.hear(op, fields, buffers)
        handler = getattr(self, "_on_" + op.replace("-", "_"), None)
        if handler is not None:
            handler(fields, buffers)

    def _on_slice(self, fields: dict[str, Any], _: Any) -> None:
        request = unpack(SliceRequest, fields["request"])
        if request.devices > 8:
            failure = Failure("refused", f"{request.devices} devices were asked for, 8 exist")
            subject = f"slice {fields['slice']}"
            self.say("refused", {"subject": subject, "failure": pack(failure)})
            return
        made = binding(request.shape, request.axes, fields["slice"], request.island or "island0")
        self._bindings[made.slice] = made
        self.edge.bound(made)
        self.say("slice-bound", {"binding": pack(made)})

    def _on_function(self, fields: dict[str, Any], buffers: list[memoryview]) -> None:
        self._fields[fields["function"], fields["slice"]] = fields
        self._blobs[fields["function"]] = bytes(buffers[0])

    def _on_program(self, fields: dict[str, Any], _: Any) -> None:
        plan = laid_out(unpack(Folded, fields["plan"]))
        self._plans[plan.key] = plan

    def _on_forget(self, fields: dict[str, Any], _: Any) -> None:
        def forget() -> None:
            for key in fields["plans"]:
                del self._plans[key]
            for function, where in fields["functions"]:
                del self._fields[function, where]
                self._compiled.pop((function, where), None)

        if self.held:
            self._waiting.append(forget)  # after the runs that need them
        else:
            forget()

    def _on_declare(self, fields: dict[str, Any], _: Any) -> None:
        self.declared.add(fields["buffer"])

    def _on_drop(self, fields: dict[str, Any], _: Any) -> None:
        def drop() -> None:
            self.declared.difference_update(fields["buffers"])
            for buffer in set(fields["buffers"]) - self.kept:
                self.arrays.pop(buffer, None)
                self._gone.add(buffer)  # its bytes may still be on their way

        if self.held:
            self._waiting.append(drop)  # after the runs that read them
        elif self._late:
            self._late.append(drop)
        else:
            drop()

    def _on_cancel(self, fields: dict[str, Any], _: Any) -> None:
        failure = Failure("cancelled", "the run was cancelled")
        found = 0
        for submitted in self.of("submit"):
            named = {*submitted["outputs"]}.intersection(fields.get("buffers", ()))
            if submitted["run"] in fields["runs"] or named:
                self._end(submitted, failure)
                found += 1
        if "id" in fields:
            self._answer(fields, {"cancelled": found, "begun": 0, "going": 0})

    def _answer(
        self,
        asked: dict[str, Any],
        fields: dict[str, Any],
        buffers: Sequence[bytes] = (),
        failure: Failure | None = None,
    ) -> None:
        packed = None if failure is None else pack(failure)
        self.say("answered", {**fields, "id": asked["id"], "failure": packed}, list(buffers))

    def _on_publish(self, fields: dict[str, Any], buffers: list[memoryview]) -> None:
        self.kept.update(fields["buffers"])
        self.published[fields["name"]] = fields["buffers"], bytes(buffers[0])
        self.say("topology", self._topology(2))
        self._answer(fields, {})

    def _on_named(self, fields: dict[str, Any], _: Any) -> None:
        numbers, _ = self.published.get(fields["name"], ([], b""))
        self._answer(fields, {"count": len(numbers)})

    def _on_take(self, fields: dict[str, Any], _: Any) -> None:
        """As if another client had published it: from slice 7 of bob's."""
        name = fields["name"]
        if name not in self.published:
            text = f"name {name}: nothing is published under this name"
            self._answer(fields, {}, failure=Failure("refused", text))
            return
        stored, about = self.published[name]
        taken = dataclasses.replace(binding((2,), ("x",), 2 << 32 | 7), client="bob")
        self._bindings[taken.slice] = taken
        self.edge.taken(taken)
        self.arrays.update(
            {n: self.arrays[s] for n, s in zip(fields["buffers"], stored, strict=True)}
        )
        more = {"slices": [taken.slice] * len(stored), "bindings": [pack(taken)]}
        tickets = [b"may"] * len(stored)
        self._answer(fields, {"stored": stored, "tickets": tickets, **more}, [about])
        self.say("resolved", {"resolved": [[fields["buffers"], None]]})

    def _on_donation(self, fields: dict[str, Any], _: Any) -> None:
        kept = [[n, f"buffer {n} is kept", "wait"] for n in fields["buffers"] if n in self.kept]
        self._answer(fields, {"refused": kept[0] if kept else None})

    def _on_window(self, fields: dict[str, Any], _: Any) -> None:
        self.window = self.window if fields["seconds"] is None else fields["seconds"]
        self._answer(fields, {"seconds": self.window})

    def _on_submit(self, fields: dict[str, Any], buffers: list[memoryview]) -> None:
        if hear := fields.get("hear"):
            asked = {"id": hear, "buffer": fields["outputs"][0], "devices": []}
            self._fetches += [(link, asked) for link in self._data_links]

        def run() -> None:
            # Uploads come on other links, and perhaps later.
            if all(buffer is None or buffer in self.arrays for buffer in fields["inputs"]):
                self._run(fields, buffers)
            else:
                self._late.append(run)

        if self.held:
            self._waiting.append(run)
        else:
            run()
        if "dropped" in fields:
            self._on_drop({"buffers": fields["dropped"]}, None)

    def _end(self, fields: dict[str, Any], failure: Failure | None) -> None:
        packed = None if failure is None else pack(failure)
        self.say("resolved", {"resolved": [[fields["outputs"], packed]]})
        outcome = "finished" if failure is None else failure.kind
        self.say(
            "run-ended",
            {"resolved": [], "run": fields["run"], "outcome": outcome, "failure": packed},
        )
        self._answer_fetches()

    # --- the devices ------------------------------------------------------------------------

    def sharding(self, slice_id: int, layout: Layout) -> NamedSharding:
        names = tuple(name for name, _ in layout.mesh)
        sizes = tuple(size for _, size in layout.mesh)
        mesh = Mesh(np.array(self._devices[: layout.devices]).reshape(sizes), names)
        return NamedSharding(mesh, PartitionSpec(*[axes or None for axes in layout.spec]))

    def _put(self, data: Any, value: Any) -> Any:
        element = element_of(value.dtype)
        array = np.frombuffer(data, element.dtype).reshape((*value.shape, *element.trailing))
        if element.trailing:
            return jax.device_put(
                jax.random.wrap_key_data(array), self.sharding(value.slice, value.layout)
            )
        return jax.device_put(array, self.sharding(value.slice, value.layout))

    def _run(self, fields: dict[str, Any], buffers: list[memoryview]) -> None:
        plan = self._plans[fields["plan"]]
        values: dict[int, Any] = {}
        for number, buffer in enumerate(fields["inputs"]):
            place = plan.inputs[number]
            if buffer is None:
                values[place] = self._put(buffers[fields["arguments"][number]], plan.values[place])
            else:
                values[place] = self.arrays[buffer]
        for step in plan.steps:
            node = step.node
            if node.when is not None:
                decided = values.get(node.when.value)
                if decided is None or int(decided) % node.when.cases != node.when.case:
                    self.skipped.append(node.name)
                    continue
            if not isinstance(node, Call):
                target = plan.values[node.output]
                sharding = self.sharding(target.slice or 0, target.layout)  # type: ignore[arg-type]
                values[node.output] = jax.device_put(np.asarray(values[node.input]), sharding)
                continue
            if node.name == self.failing:
                failure = Failure(
                    "execute", "boom", program=plan.name, node=node.name, line=node.line
                )
                self._end(fields, failure)
                return
            given = [array for v in node.inputs for array in _arrays(plan.values[v], values[v])]
            results = iter(self._call(node, given))
            for v in node.outputs:
                leaves = plan.values[v].leaves
                values[v] = (
                    list(itertools.islice(results, len(leaves))) if leaves else next(results)
                )
        for buffer, place in zip(fields["outputs"], plan.outputs, strict=True):
            self.arrays[buffer] = values[place]
        self._end(fields, None)

    def _call(self, node: Call, arguments: list[Any]) -> list[Any]:
        fields = self._fields[node.function, node.slice]
        run, ins = self._compiled.get((node.function, node.slice), (None, ()))
        if run is None:
            run, ins = self._compile(node, fields)
            self._compiled[node.function, node.slice] = run, ins
        for array, wanted in zip(arguments, ins, strict=True):
            assert array.sharding.is_equivalent_to(wanted, array.ndim), "an argument lies elsewhere"
        made = run(*arguments)
        for array, (shape, dtype) in zip(made, fields["out_types"], strict=True):
            assert (array.shape, str(array.dtype)) == (tuple(shape), dtype)
        return list(made)

    def _compile(self, node: Call, fields: dict[str, Any]) -> tuple[Any, list[NamedSharding]]:
        ins = [self.sharding(node.slice, unpack(Layout, entry)) for entry in fields["in_layouts"]]
        outs = [self.sharding(node.slice, unpack(Layout, entry)) for entry in fields["out_layouts"]]
        blob = self._blobs[node.function]
        if fields["kind"] == "export":
            return _exported(blob, tuple(ins), tuple(outs)), ins

        def wrap(call: Any, numbered: bool, _: Any) -> Any:
            return lambda *args: call(*args[numbered:])

        return _jitted(pickle.loads(blob).calling(wrap), ins, outs), ins

    def _on_declare(self, fields: dict[str, Any], _: Any) -> None:
        pass

    def _on_put(self, link: Link, fields: dict[str, Any], buffers: list[memoryview]) -> None:
        put = unpack_fields(Put, fields)
        _, parts = self._uploads.setdefault(put.buffer, (fields, {}))
        parts.update(put.parts(buffers))
        layout, shape = put.layout, put.shape
        if len(parts) < layout.devices or fields["buffer"] in self._gone:
            return
        element = element_of(fields["dtype"])
        whole = np.empty((*shape, *element.trailing), element.dtype)
        for device, box in enumerate(boxes(layout, shape)):
            extent = tuple(stop - start for start, stop in box)
            part = np.frombuffer(parts[device], element.dtype)
            whole[index(box)] = part.reshape((*extent, *element.trailing))
        value = jax.random.wrap_key_data(whole) if element.trailing else whole
        self.arrays[fields["buffer"]] = jax.device_put(
            value, self.sharding(fields["slice"], layout)
        )
        self.say("resolved", {"resolved": [[[fields["buffer"]], None]]})
        self._answer_fetches()
        late, self._late = self._late, []
        for run in late:
            run()

    def _on_fetch(self, link: Link, fields: dict[str, Any], _: Any) -> None:
        self._fetches.append((link, fields))
        self._answer_fetches()

    def _answer_fetches(self) -> None:
        waiting, self._fetches = self._fetches, []
        for link, fields in waiting:
            array = self.arrays.get(fields["buffer"])
            if array is None:
                self._fetches.append((link, fields))
                continue
            if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                array = jax.random.key_data(array)
            shards = {s.device: np.ascontiguousarray(s.data) for s in array.addressable_shards}
            devices = list(array.sharding.mesh.devices.flat)
            parts = [shards[devices[number]].tobytes() for number in fields["devices"]]
            with contextlib.suppress(LinkClosed):
                link.send("fetched", {"id": fields["id"]}, parts)


def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls come so fast, and have for so long, that they wait until nothing is under way."""
    monkeypatch.setattr(call_batching, "SOON", 60.0)
    monkeypatch.setattr(call_batching.Burst, "over", lambda *_: False)


def without_ticks(fake: FakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nobody is told of dropped handles, and no call leaves, because a tick is due."""
    ticked, tick = threading.Event(), connection._TICK
    monkeypatch.setattr(connection, "_TICK", 60.0)
    fake.connection.reactor.call_later(tick, ticked.set)
    assert ticked.wait(20), "the tick that was due before has come before"
