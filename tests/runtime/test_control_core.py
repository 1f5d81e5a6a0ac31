"""The real core behind the real sockets: the life of a run, told by its messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_lab.core.control import Control
from pathways_lab.core.errors import Failure
from pathways_lab.core.messages import Grant, HostReport
from pathways_lab.core.program.folding import Folded, folded, laid_out
from pathways_lab.core.program.layout import Layout
from pathways_lab.core.program.program import Call, Plan, Step, Transfer, Value
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.runtime.control_plane.process import ControlPlane, Keys
from pathways_lab.timeline.queries import flows
from pathways_lab.timeline.records import Event, Record
from pathways_lab.transport import record_encoding
from pathways_lab.transport.auth import HOSTS, key_of, new_key
from pathways_lab.transport.codec import pack, pack_fields, unpack, unpack_fields
from pathways_lab.transport.link import Link
from pathways_lab.transport.reactor import Reactor
from tests.runtime.processes import until
from tests.runtime.rim_kit import announcement

LAYOUT = Layout((("x", 2),), (("x",),))


class Host:
    """A host that compiles at once and finishes every granted step at once, unless it is busy."""

    def __init__(self, name: str, address: str, key: bytes) -> None:
        self.name = name
        self.busy = False
        self.plans: dict[str, Plan] = {}
        self.bindings: dict[int, SliceBinding] = {}
        self.grants: list[tuple[Grant, list[bytes]]] = []
        self.freed: list[int] = []
        self.reactor = Reactor(name, self._message, lambda link, reason: None)
        self.reactor.start()
        hello = {
            "role": "host", "name": name, "island": name.split("/")[0], "devices": 2,
            "kind": "cpu", "memory": 1 << 20, "pid": 1, "worker_pid": 2,
            "data_address": "unix:/x", "emulated": True,
        }  # fmt: skip
        self.link = self.reactor.connect(address, key_of(key, HOSTS), hello, holder=HOSTS)

    def _message(self, link: Link, op: str, fields: dict[str, Any], buffers: list[Any]) -> None:
        if op == "bind":
            binding = unpack(SliceBinding, fields["binding"])
            self.bindings[binding.slice] = binding
        elif op == "prepare":
            key = (fields["function"], fields["slice"], 0, None)
            self._report(compiled=(key,))
        elif op == "program":
            plan = laid_out(unpack(Folded, fields["plan"]))
            self.plans[plan.key] = plan
        elif op == "grant":
            grant = unpack_fields(Grant, {**fields, "host": self.name})
            self.grants.append((grant, [bytes(b) for b in buffers]))
            plan = self.plans[grant.plan]
            steps = range(grant.first, grant.last)
            mine = [i for i in steps if self._involved(plan, plan.steps[i])]
            if not self.busy:
                self._report(ended=tuple((grant.run, i, (0.001,)) for i in mine))
        elif op == "free":
            self.freed += fields["buffers"]

    def _involved(self, plan: Plan, step: Step) -> bool:
        node = step.node
        slices = (
            {node.slice}
            if isinstance(node, Call)
            else {plan.values[node.input].slice, plan.values[node.output].slice}
        )
        return bool(slices & set(self.bindings))

    def _report(self, **what: Any) -> None:
        self.link.send(
            "report", {**pack_fields(HostReport(0.0, "", self.name, **what)), "records": []}
        )


class Lab:
    def __init__(self, folder: Path) -> None:
        keys = Keys(new_key(), new_key())
        self.plane = ControlPlane(Control(), keys, f"unix:{folder}/c", folder)
        self.plane.reactor.start()
        self.hosts = [Host(f"i{i}/h", self.plane.address, keys.door) for i in range(2)]
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.reactor = Reactor(
            "kernel", lambda link, op, fields, buffers: self.got.append((op, fields)),
            lambda link, reason: None,
        )  # fmt: skip
        self.reactor.start()
        self.link = self.reactor.connect(
            self.plane.address, keys.door, {"role": "client", "name": "", "pid": 1}
        )
        self.base = self.link.peer["number"] << 32

    def of(self, op: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.got if name == op]

    def resolved(self) -> dict[int, Failure | None]:
        """What was said last of each buffer."""
        said = [entry for _, fields in self.got for entry in fields.get("resolved", ())]
        return {b: f and unpack(Failure, f) for buffers, f in said for b in buffers}

    def failures(self) -> list[Failure]:
        return [unpack(Failure, f["failure"]) for f in self.of("refused")]

    def close(self) -> None:
        self.plane.close("over")
        self.reactor.close()
        for host in self.hosts:
            host.reactor.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def test_one_message_submits_a_run_over_two_islands(lab: Lab) -> None:
    base, link = lab.base, lab.link
    link.send("watch")
    slices = [base + 1, base + 2]
    for i, slice_id in enumerate(slices):
        request = SliceRequest((2,), ("x",), island=f"i{i}")
        link.send("slice", {"slice": slice_id, "request": pack(request)})
    until(lambda: len(lab.of("slice-bound")) == 2 or lab.failures())
    assert not lab.failures()
    for slice_id in slices:
        link.send("function", announcement(slice_id, (8,), LAYOUT), [b"code"])
    values = tuple(Value((8,), "float32", s, LAYOUT, 16) for s in (slices[0], *slices, slices[1]))
    steps = (
        Step(Call("f", slices[0], (0,), (1,), name="f"), (0,)),
        Step(Transfer(1, 2), (1,)),
        Step(Call("f", slices[1], (2,), (3,), name="f"), (2,)),
    )
    plan = Plan("plan", "twice", values, steps, (0,), (3,), tuple(slices))
    link.send("program", {"plan": pack(folded(plan))})
    for number in range(3):
        run = base + 100 + number
        fields = {
            "run": run, "plan": "plan", "inputs": [None], "outputs": [base + 200 + number],
            "arguments": {0: 0},
        }  # fmt: skip
        link.send("submit", fields, [b"a" * 32])
    until(lambda: len(lab.of("run-ended")) == 3 or lab.failures())
    assert not lab.failures()
    assert [f["outcome"] for f in lab.of("run-ended")] == ["finished"] * 3
    told = [
        entry for op in ("resolved", "run-ended") for f in lab.of(op) for entry in f["resolved"]
    ]
    assert sorted(b for buffers, _ in told for b in buffers) == [
        base + 200, base + 201, base + 202,
    ]  # fmt: skip
    for host in lab.hosts:
        first = next(entry for entry in host.grants if entry[0].run == base + 100)
        assert first[1] == [b"a" * 32]
    until(lambda: _kinds(lab).count("finished") == 3)
    counted = flows(_records(lab), base + 100)
    assert counted["submit", "kernel-1", "control"].messages == 1
    granted = [r for r in _records(lab) if isinstance(r, Event) and r.kind == "granted"]
    for island in ("i0", "i1"):
        places = [r.args["seq"] for r in granted if r.island == island]
        assert places == sorted(set(places))
    link.send("drop", {"buffers": [base + 200, base + 201, base + 202]})
    until(lambda: len(lab.hosts[1].freed) == 3)


def _records(lab: Lab) -> list[Record]:
    return [r for f in lab.of("records") for r in record_encoding.read(f["records"])]


def _kinds(lab: Lab) -> list[str]:
    return [r.kind for r in _records(lab)]  # type: ignore[union-attr]


def test_what_cannot_be_met_is_refused_with_the_story(lab: Lab) -> None:
    request = SliceRequest((64,), ("x",))
    lab.link.send("slice", {"slice": lab.base + 1, "request": pack(request)})
    until(lab.failures)
    assert "64" in lab.failures()[0].message


def _hold(lab: Lab, number: int) -> None:
    """On a slice of a host: a value (+100), a run under way (+1, makes +101), an upload (+200)."""
    host, link, base = lab.hosts[number], lab.link, lab.base + 10 * number + 10
    request = SliceRequest((2,), ("x",), island=f"i{number}")
    link.send("slice", {"slice": base, "request": pack(request)})
    until(lambda: base in host.bindings)
    link.send("function", announcement(base, (8,), LAYOUT), [b"code"])
    values = (Value((8,), "float32", base, LAYOUT, 16),) * 2
    steps = (Step(Call("f", base, (0,), (1,), name="f"), (0,)),)
    plan = Plan(f"plan{number}", "once", values, steps, (0,), (1,), (base,))
    link.send("program", {"plan": pack(folded(plan))})
    link.send("declare", {"buffer": base + 200, "slice": base, "nbytes": 16})

    def submit(run: int, output: int) -> None:
        fields = {"run": run, "plan": plan.key, "inputs": [None], "outputs": [output]}
        link.send("submit", {**fields, "arguments": {0: 0}}, [b"a" * 32])

    submit(base, base + 100)
    until(lambda: base + 100 in lab.resolved())
    host.busy = True
    submit(base + 1, base + 101)
    until(lambda: len(host.grants) == 2)


def test_a_lost_host_fails_what_it_held_and_the_rest_goes_on(lab: Lab) -> None:
    for number in (0, 1):
        _hold(lab, number)
    one, two = lab.base + 10, lab.base + 20
    assert lab.resolved() == {one + 100: None, two + 100: None}
    lab.hosts[1].reactor.close()
    until(lambda: [i["name"] for f in lab.of("topology")[-1:] for i in f["islands"]] == ["i0"])
    lost = {b: why for b, why in lab.resolved().items() if why is not None}
    assert lost.keys() == {two + 100, two + 101, two + 200}
    ends = {f["run"]: f["failure"] for f in lab.of("run-ended")}
    assert ends.keys() == {one, two, two + 1}
    for why in (unpack(Failure, ends[two + 1]), *lost.values()):
        assert (why.kind, why.host) == ("lost", "i1/h")
    lab.hosts[0]._report(ended=((one + 1, 0, (0.001,)),), resident=(one + 200,))
    until(lambda: {one + 101, one + 200} <= lab.resolved().keys())
    assert {b for b, why in lab.resolved().items() if why is not None} == lost.keys()
    assert not lab.failures()
