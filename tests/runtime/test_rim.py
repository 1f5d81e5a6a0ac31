"""The rim: checked messages become events, commands become messages, all is remembered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.errors import Failure
from pathways_lab.core.program.folding import Folded, folded, laid_out
from pathways_lab.core.scheduling.policies import FIFO, PolicyView, ProportionalShare, RemotePolicy
from pathways_lab.core.slices.topology import SliceBinding, SliceRequest
from pathways_lab.runtime.control_plane.directory import HostSeen
from pathways_lab.timeline.queries import flows
from pathways_lab.timeline.records import Event
from pathways_lab.transport import record_encoding
from pathways_lab.transport.auth import ticket_of
from pathways_lab.transport.codec import pack, pack_fields, unpack, unpack_fields
from pathways_lab.transport.edge import Malformed
from tests.runtime.rim_kit import (
    DATA_KEY,
    ONE,
    TWO,
    Lab,
    Peer,
    announcement,
    grants,
    plan_on,
    submitted,
)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def wide(lab: Lab, number: int) -> None:
    """A slice of client 1 over both hosts; the script says that they are of one island."""
    devices = (("i0/h", 0), ("i1/h", 0))
    bound = SliceBinding(ONE + number, "kernel-1", "i0", (2,), ("x",), devices, "cpu")
    lab.core.answer = lambda event: [m.SliceBound("c", "kernel-1", bound)]
    lab.say(1, "slice", slice=bound.slice, request=pack(SliceRequest((2,), ("x",))))
    lab.core.answer = lambda event: []


def test_hosts_of_a_wide_slice_are_introduced(lab: Lab) -> None:
    """They hear of the formation before the slice, meet, and part when it is freed."""
    assert lab.services.said == [], "slices of one host need nobody"
    wide(lab, 7)
    assert lab.services.said == [("open", 1)]
    lab.rim.formations.opened(1, "unix:/there")
    for peer in lab.hosts.values():
        assert [op for op, _, _ in peer.sent if op != "peers"][-3:] == ["span", "bind", "form"]
        assert peer.of("form") == [{"number": 1, "address": "unix:/there"}]
    for name in lab.hosts:
        lab.rim.from_host(name, "joined", {"number": 1, "failure": None}, [], 10)
    lab.core.answer = lambda event: [m.SliceFreed("c", ("i0/h", "i1/h"), ONE + 7)]
    lab.say(1, "release-slice", slice=ONE + 7)
    assert [op for op, _, _ in lab.hosts["i1/h"].sent][-2:] == ["unbind", "dissolve"]
    for name in lab.hosts:
        assert lab.services.said == [("open", 1)]
        lab.rim.from_host(name, "left", {"number": 1}, [], 10)
    assert lab.services.said == [("open", 1), ("close", 1)]


def test_a_host_that_cannot_join_parts_the_others(lab: Lab) -> None:
    wide(lab, 7)
    failure = pack(Failure("lost", "no memory"))
    lab.rim.from_host("i1/h", "joined", {"number": 1, "failure": failure}, [], 10)
    assert "i1/h could not join: no memory" in lab.hosts["i0/h"].of("dissolve")[0]["reason"]


def test_slices_are_lost_when_their_collectives_break(lab: Lab) -> None:
    wide(lab, 7)
    lab.core.events.clear()
    lab.rim.from_host("i0/h", "broken", {"number": 1, "reason": "reset by peer"}, [], 10)
    (lost,) = lab.core.events
    assert isinstance(lost, m.SlicesLost)
    assert (lost.slices, lost.reason) == ((ONE + 7,), "reset by peer")
    assert lab.hosts["i1/h"].of("dissolve") == [{"number": 1, "reason": "reset by peer"}]


def test_a_host_is_restarted_by_word(lab: Lab) -> None:
    """Its loss is a fact at once, with the reason, also if it hears nothing any more."""
    lab.core.events.clear()
    lab.rim.restart_host("i0/h", "its gang does not end")
    assert lab.hosts["i0/h"].of("restart") == [{"reason": "its gang does not end"}]
    (lost,) = lab.core.events
    assert isinstance(lost, m.HostLost)
    assert "restarted: its gang does not end" in lost.reason
    lab.rim.restart_host("i0/h", "again")
    assert len(lab.core.events) == 1


def test_others_stop_waiting_for_a_lost_host_before_the_core_knows(lab: Lab) -> None:
    wide(lab, 7)
    told: list[bool] = []

    def lost(event: m.Event) -> list[m.Command]:
        told.append(bool(lab.hosts["i0/h"].of("dissolve")))
        return []

    lab.core.answer = lost
    lab.rim.host_lost("i1/h", "killed")
    assert told == [True]
    assert not lab.hosts["i1/h"].of("dissolve")


def test_hosts_hear_who_has_left_and_count_who_lies(lab: Lab) -> None:
    lab.rim.client_left("kernel-1", "gone")
    for host in lab.hosts.values():
        assert host.of("clients")[-1] == {"newest": 2, "present": [2]}
    lab.rim.from_host("i0/h", "rejected", {"client": 2, "reason": "not yours"}, [], 1)
    assert lab.rim.rejected == 1


def test_who_takes_a_handle_gets_a_ticket_and_all_hear_of_names(lab: Lab) -> None:
    lab.rim.happened(m.HandlePublished(0.0, "c", "kernel-1", "w", (ONE + 5,)))
    lab.core.answer = lambda event: [
        m.Published("c", "kernel-1", "w"),
        m.Taken("c", "kernel-2", "w", (2 << 32 | 1,), (ONE + 5,), (ONE,), b"about", 3),
    ]
    lab.say(2, "take", name="w", buffers=[2 << 32 | 1], id=3)
    assert lab.clients[0].of("topology")[-1]["published"] == {"w": "kernel-1"}
    (taken,) = lab.clients[1].of("answered")
    assert (taken["id"], taken["failure"]) == (3, None)
    assert (taken["stored"], taken["tickets"]) == ((ONE + 5,), [ticket_of(DATA_KEY, ONE + 5, 2)])
    lab.core.answer = lambda event: [m.Unpublished("c", "kernel-1", "w")]
    lab.say(1, "unpublish", name="w", id=4)
    assert lab.clients[1].of("topology")[-1]["published"] == {}
    lab.say(2, "take", name="", buffers=[2 << 32 | 2], id=5)
    lab.say(2, "publish", name="w", buffers=[ONE + 5], id=6)
    assert lab.rim.rejected == 2
    refused = lab.clients[1].of("answered")[1:]
    assert [answer["id"] for answer in refused] == [5, 6]
    assert f"buffer {ONE + 5} does not belong" in unpack(Failure, refused[1]["failure"]).message


def test_slices_without_a_host_are_forgotten(lab: Lab) -> None:
    """The core frees a slice by telling its hosts, and here are none."""
    wide(lab, 7)
    lab.rim.host_lost("i1/h", "killed")
    assert set(lab.rim.registry.bindings) == {ONE, ONE + 7}, "one host of the wide one lives"
    lab.rim.host_lost("i0/h", "killed")
    assert not lab.rim.registry.bindings
    assert lab.clients[0].of("topology")[-1] == {
        "islands": [],
        "down": [],
        "plain_collectives": False,
        "slices": [],
        "away": {ONE: "lost", ONE + 1: "lost", ONE + 7: "lost"},
        "clients": ["kernel-1", "kernel-2"],
        "published": {},
        "kept": [],
        "going": {},
    }


def test_joining_is_told_to_core_hosts_and_clients(lab: Lab) -> None:
    kinds = [type(event).__name__ for event in lab.core.events]
    assert kinds == ["ClientJoined"] * 2 + ["HostJoined"] * 2 + ["SliceRequested"] * 2
    assert lab.hosts["i1/h"].of("clients")[-1] == {"newest": 2, "present": [1, 2]}
    assert lab.hosts["i0/h"].of("peers")[-1] == {"peers": {"i0/h": "d0", "i1/h": "d1"}}
    topology = lab.clients[1].of("topology")[-1]
    assert [island["name"] for island in topology["islands"]] == ["i0", "i1"]
    assert unpack(SliceBinding, topology["slices"][1]).slice == ONE + 1
    assert unpack(SliceBinding, lab.hosts["i0/h"].of("bind")[0]["binding"]).slice == ONE


def test_every_client_message_becomes_its_event(lab: Lab) -> None:
    plan = plan_on((ONE, ONE + 1))
    lab.core.events.clear()
    lab.say(1, "function", b"code", **announcement(ONE))
    lab.say(1, "program", plan=pack(folded(plan)))
    lab.say(1, "declare", buffer=ONE + 5, slice=ONE, nbytes=4, shape=[1], dtype="float32")
    lab.say(1, "submit", b"arg", run=ONE + 9, plan="plan", inputs=[None], outputs=[ONE + 6],
            arguments={0: 0})  # fmt: skip
    lab.say(1, "cancel", runs=[ONE + 9])
    lab.say(1, "forget", plans=["plan"], functions=[["f", ONE]])
    lab.say(1, "drop", buffers=[ONE + 5, ONE + 6])
    lab.say(1, "release-slice", slice=ONE)
    lab.say(1, "policy", policy=pack(ProportionalShare({"a": 2.0})), id=5)
    bare = [type(event)(**{**_fields(event), "time": 0, "cause": ""}) for event in lab.core.events]
    client = "kernel-1"
    assert bare == [
        m.FunctionAnnounced(0, "", client, "f", ONE),
        m.ProgramRegistered(0, "", client, plan),
        m.BufferDeclared(0, "", client, ONE + 5, ONE, 4),
        m.RunSubmitted(0, "", client, ONE + 9, "plan", (None,), (ONE + 6,)),
        m.CancelRequested(0, "", client, (ONE + 9,)),
        m.ProgramsDropped(0, "", client, ("plan",), (("f", ONE),)),
        m.BuffersDropped(0, "", client, (ONE + 5, ONE + 6)),
        m.SliceReleased(0, "", client, ONE),
        m.PolicyChosen(0, "", client, ProportionalShare({"a": 2.0}), 5),
    ]
    assert not lab.clients[0].of("refused")
    assert len({event.cause for event in lab.core.events}) == 9


def _fields(event: m.Event) -> dict[str, Any]:
    return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}


FOREIGN: list[tuple[str, dict[str, Any]]] = [
    ("slice", {"slice": ONE + 3, "request": pack(SliceRequest((1,), ("x",)))}),
    ("release-slice", {"slice": ONE}),
    ("function", announcement(ONE)),
    ("program", {"plan": pack(folded(plan_on((ONE, TWO), "other")))}),
    ("program", {"plan": pack(folded(plan_on((TWO, TWO), "plan")))}),
    ("forget", {"plans": ["plan"], "functions": []}),
    ("forget", {"plans": [], "functions": [["f", ONE]]}),
    ("submit", {"run": ONE + 1, "plan": "plan", "inputs": [], "arguments": {}, "outputs": []}),
    ("submit", {"run": TWO + 1, "plan": "plan", "inputs": [], "arguments": {}, "outputs": [TWO]}),
    ("submit", {"run": TWO + 1, "plan": "p", "inputs": [ONE + 6], "arguments": {}, "outputs": []}),
    ("submit", {"run": TWO + 1, "plan": "p", "inputs": [], "arguments": {}, "outputs": [ONE + 6]}),
    ("declare", {"buffer": ONE, "slice": TWO, "nbytes": 4}),
    ("declare", {"buffer": TWO, "slice": ONE, "nbytes": 4}),
    ("drop", {"buffers": [TWO, ONE]}),
    ("cancel", {"runs": [ONE]}),
    ("cancel", {"runs": [], "buffers": [ONE + 6]}),
]


@pytest.mark.parametrize(("op", "fields"), FOREIGN)
def test_a_client_may_only_name_its_own_ids(lab: Lab, op: str, fields: dict[str, Any]) -> None:
    lab.say(1, "program", plan=pack(folded(plan_on((ONE, ONE + 1)))))
    lab.core.events.clear()
    lab.say(2, op, *([b"code"] if op == "function" else []), **fields)
    assert lab.core.events == []
    (refused,) = lab.clients[1].of("refused")
    assert unpack(Failure, refused["failure"]).kind == "refused"
    assert lab.rim.rejected == 1


RUN: dict[str, Any] = {
    "run": ONE + 1, "plan": "p", "inputs": [], "outputs": [ONE], "arguments": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "fields", "says"),
    [
        ("function", announcement(ONE), "code of the function"),
        ("function", {**announcement(ONE), "donated": [1]}, "donates an argument"),
        ("function", {**announcement(ONE), "in_types": []}, "not as many"),
        (
            "function",
            {**announcement(ONE), "kind": "apart", "out_types": [[[2], "float32"]]},
            "not those that come out",
        ),
        ("function", {**announcement(ONE), "in_types": [[[1], "float33"]]}, "'float33' is not"),
        ("slice", {"slice": ONE + 8, "request": pack(SliceRequest((), ()))}, "1 to 3 axes"),
        ("slice", {"slice": ONE + 8, "request": pack(SliceRequest((-1,), ("x",)))}, "cannot be"),
        ("submit", {**RUN, "inputs": [None]}, "arguments"),
        ("submit", {**RUN, "inputs": [None], "arguments": {0: 7}}, "arguments"),
        ("submit", {**RUN, "outputs": [], "hear": 4}, "with one output"),
        ("submit", {**RUN, "outputs": [ONE, ONE]}, "was there before"),
        ("submit", {**RUN, "race": [TWO, 0]}, "does not belong"),
    ],
)
def test_what_may_not_be_is_refused_with_the_reason(
    lab: Lab, op: str, fields: dict[str, Any], says: str
) -> None:
    lab.core.events.clear()
    lab.say(1, op, **fields)
    assert lab.core.events == []
    (refused,) = lab.clients[0].of("refused")
    assert says in unpack(Failure, refused["failure"]).message
    assert lab.rim.rejected == 1


@pytest.mark.parametrize(
    ("op", "fields", "says"),
    [
        ("nonsense", {}, "'nonsense': there is no such message"),
        ("slice", {}, "Slice.slice is missing"),
        ("slice", {"slice": "x"}, "expected int"),
        ("slice", {"slice": ONE + 8, "request": 3}, "expected one of"),
        ("submit", {**RUN, "hear": -1}, "hear: expected a number from 0"),
        ("submit", {**RUN, "arguments": {"0": 0}}, "expected int"),
        ("declare", {"buffer": ONE, "slice": ONE, "nbytes": -4}, "from 0 to"),
        ("drop", {"buffers": "all"}, "expected a list"),
        ("policy", {"policy": ["Mine"], "id": 1}, "expected one of"),
        ("policy", {"policy": ["ProportionalShare", {"a": 0}, ""], "id": 1}, "not by ''"),
        ("lease", {"island": "i0", "order": True, "patience": "x", "id": 1}, "finite number"),
        ("stuck", {"seconds": float("nan"), "id": 1}, "finite number"),
        ("stuck", {"seconds": 1.0}, "Wonder.id is missing"),
    ],
)
def test_malformed_messages_close_their_link_and_are_counted(
    lab: Lab, op: str, fields: dict[str, Any], says: str
) -> None:
    lab.core.events.clear()
    with pytest.raises(Malformed, match=says):
        lab.say(1, op, **fields)
    assert lab.core.events == []
    assert lab.rim.rejected == 1


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("leave", {"island": "none", "anyway": False}),
        ("publish", {"name": "", "buffers": [ONE]}),
        ("publish", {"name": "x" * 201, "buffers": [ONE]}),
        ("take", {"name": "x" * 201, "buffers": [ONE]}),
        ("unpublish", {"name": "x" * 201}),
        ("quota", {"whom": "x" * 201, "devices": 1, "nbytes": None}),
    ],
)
def test_who_waits_for_an_answer_recognises_a_refusal(
    lab: Lab, op: str, fields: dict[str, Any]
) -> None:
    lab.say(1, op, **fields, id=ONE + 8)
    (answer,) = lab.clients[0].of("answered")
    assert answer["id"] == ONE + 8
    assert unpack(Failure, answer["failure"]).kind == "refused"


def test_what_fails_behind_the_edge_fails_that_request_alone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(lab.rim.standstill, "wonder", broken)
    lab.say(1, "stuck", seconds=1.0, id=7)
    (answer,) = lab.clients[0].of("answered")
    assert answer["id"] == 7
    assert unpack(Failure, answer["failure"]).kind == "internal"
    lab.say(2, "watch")
    assert lab.clients[1].of("records")


def test_what_goes_with_a_run_travels_with_the_first_grant_to_each_host_only(lab: Lab) -> None:
    submitted(lab, hear=7)
    lab.core.answer = lambda event: grants(ONE + 9)
    lab.say(1, "cancel", runs=[ONE + 9])
    for peer in lab.hosts.values():
        (_, first, bytes_), (_, second, nothing) = [s for s in peer.sent if s[0] == "grant"]
        assert (first["arguments"], bytes_, nothing) == ({0: 0}, [b"arg"], [])
        assert first["hear"] == 7
        assert "arguments" not in second
        assert "hear" not in second
        assert unpack_fields(m.Grant, {**first, "host": "i0/h"}).plan == "plan"
    program = lab.hosts["i0/h"].of("program")[0]
    assert laid_out(unpack(Folded, program["plan"])) == plan_on((ONE, ONE + 1))
    assert [unpack(SliceBinding, b).slice for b in program["bindings"]] == [ONE, ONE + 1]
    lab.core.answer = lambda event: [m.RunEnded("c", "kernel-1", ONE + 9, "finished")]
    lab.say(1, "cancel", runs=[ONE + 9])
    assert not lab.rim.registry.arguments
    assert not lab.rim.registry.programs


def test_grants_leave_before_they_are_written_down_and_ends_are_written_first(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts wait for grants; who a run belonged to is forgotten when its end is told."""
    told: list[tuple[int, int]] = []
    decided = lab.rim.diary.decided

    def write(*what: Any) -> None:
        told.append((len(lab.hosts["i0/h"].of("grant")), len(lab.clients[0].of("run-ended"))))
        decided(*what)

    monkeypatch.setattr(lab.rim.diary, "decided", write)
    submitted(lab)
    lab.core.answer = lambda event: [m.RunEnded("c", "kernel-1", ONE + 9, "finished")]
    lab.say(1, "cancel", runs=[ONE + 9])
    assert told == [(0, 0), (1, 0), (1, 0)]  # the program, the run, its end
    assert len(lab.clients[0].of("run-ended")) == 1


def test_submitting_twice_is_refused_and_leaves_the_first_alone(lab: Lab) -> None:
    submitted(lab)
    again = {"run": ONE + 9, "plan": "plan", "inputs": [None], "outputs": [ONE + 7],
             "arguments": {0: 0}}  # fmt: skip
    lab.say(1, "submit", b"arg", **again)
    assert len(lab.clients[0].of("refused")) == 1
    assert ONE + 9 in lab.rim.registry.arguments
    lab.core.answer = lambda event: [m.RunEnded("c", "kernel-1", ONE + 9, "finished")]
    lab.say(1, "cancel", runs=[ONE + 9])
    lab.core.events.clear()
    lab.say(1, "submit", b"arg", **again)
    lab.say(1, "submit", b"arg", **{**again, "run": ONE + 10, "outputs": [ONE + 6]})
    assert lab.core.events == [], "numbers are used once, also when what had them is over"
    assert lab.rim.rejected == 3


def test_what_policies_are_told_of_a_run_is_checked(lab: Lab) -> None:
    for wrong in ({"priority": 1 << 40}, {"data": [["a", [1]]]}, {"data": [["a", float("inf")]]}):
        lab.say(1, "submit", b"arg", run=ONE + 9, plan="plan", inputs=[None], outputs=[ONE + 6],
                arguments={0: 0}, **wrong)  # fmt: skip
    assert len(lab.clients[0].of("refused")) == 3
    assert not lab.rim.registry.programs


def test_the_timeline_tells_places_messages_and_ends(lab: Lab) -> None:
    lab.say(1, "watch")
    submitted(lab)
    report = m.HostReport(0, "", "", ended=((ONE + 9, 0, (0.1,)),))
    ended = m.RunEnded("c", "kernel-1", ONE + 9, "failed", Failure("execute", "because"))
    lab.core.answer = lambda event: [m.Resolved("c", "kernel-1", (ONE + 6,)), ended]
    own = [record_encoding.write(Event("launched", 1.0, "i0", "i0/h", ONE + 9, 0))]
    lab.rim.from_host("i0/h", "report", {**pack_fields(report), "records": own}, [], 60)
    records = lab.records()
    granted = [r for r in records if isinstance(r, Event) and r.kind == "granted"]
    assert [(g.island, g.step, g.args["seq"], g.node) for g in granted] == [
        ("i0", 0, 40, "f"),
        ("i1", 2, 71, "g"),  # the transfer took 70 there
    ]
    assert granted[0].args["line"] == "a.py:3: f(x)"
    kinds = [r.kind for r in records if isinstance(r, Event)]
    for kind in ("host-joined", "slice-bound", "submitted", "launched", "resolved", "failed"):
        assert kind in kinds
    counted = flows(records, ONE + 9)
    assert {way: flow.messages for way, flow in counted.items()} == {
        ("submit", "kernel-1", "control"): 1,
        ("grant", "control", "i0/h"): 1,
        ("grant", "control", "i1/h"): 1,
        ("report", "i0/h", "control"): 1,
        ("run-ended", "control", "kernel-1"): 1,
    }


def test_a_record_that_somebody_could_not_read_costs_its_host_the_link(lab: Lab) -> None:
    wrong = record_encoding.write(Event("launched", 1.0, "i0", "i0/h", node=None))  # type: ignore[arg-type]
    lab.say(2, "watch")
    before = len(lab.records(1))
    with pytest.raises(Malformed):
        lab.rim.from_host("i0/h", "report", {"records": [wrong], "resident": [ONE]}, [], 60)
    (told,) = lab.records(1)[before:]
    assert isinstance(told, Event)
    assert (told.kind, told.host) == ("rejected", "i0/h")


def test_code_is_kept_per_client_and_dropped_with_its_slice(lab: Lab) -> None:
    lab.core.answer = lambda event: [m.Prepare("c", ("i0/h",), "f", ONE)]
    lab.say(1, "function", b"code", **announcement(ONE))
    (op, fields, buffers) = lab.hosts["i0/h"].sent[-1]
    assert (op, fields["kind"], buffers) == ("prepare", "export", [b"code"])
    lab.core.answer = lambda event: [m.SliceFreed("c", ("i0/h",), ONE)]
    lab.say(1, "release-slice", slice=ONE)
    assert lab.hosts["i0/h"].of("unbind") == [{"slice": ONE}]
    assert not lab.rim.registry.blobs
    assert ONE not in lab.rim.registry.bindings


def test_a_client_that_leaves_takes_its_parcels_along(lab: Lab) -> None:
    submitted(lab)
    lab.core.answer = lambda event: [m.SliceFreed("c", ("i0/h",), ONE)]
    lab.rim.client_left("kernel-1", "gone")
    lab.rim.client_left("kernel-1", "gone")
    assert [type(e) for e in lab.core.events].count(m.ClientLeft) == 1
    assert not lab.rim.registry.arguments
    assert not lab.rim.registry.plans


def test_output_goes_to_the_client_of_the_run_only(lab: Lab) -> None:
    lab.rim.from_host("i1/h", "output", {"run": ONE + 9, "device": 3, "text": "hi"}, [], 10)
    assert lab.clients[0].of("output") == [
        {"host": "i1/h", "run": ONE + 9, "device": 3, "text": "hi"}
    ]
    assert not lab.clients[1].of("output")


def test_a_new_incarnation_loses_the_old_one_first(lab: Lab) -> None:
    old, new = lab.hosts["i0/h"], Peer()
    lab.core.events.clear()
    lab.rim.host_joined(HostSeen("i0/h", "i0", 1, "cpu", 10, 1, 2, "d9", False), new)
    lab.rim.host_lost("i0/h", "the old link closed", old)
    assert [type(e) for e in lab.core.events] == [m.HostLost, m.HostJoined]
    assert lab.rim.peers.is_current("i0/h", new)
    assert not lab.rim.peers.is_current("i0/h", old)


def test_the_last_words_of_a_host_are_the_reason_of_its_loss(lab: Lab) -> None:
    lab.core.events.clear()
    lab.rim.from_host("i0/h", "closing", {"reason": "XLA gave up"}, [], 10)
    (lost,) = lab.core.events
    assert isinstance(lost, m.HostLost)
    assert "XLA gave up" in lost.reason


def set_policy(lab: Lab, policy: Any, failure: Failure | None = None) -> None:
    """The core says that kernel-1 has set a policy, or that it was removed."""
    owner = "" if failure else "kernel-1"
    lab.core.answer = lambda event: [m.PolicySet("c", "kernel-1", policy, owner, failure, 4)]
    lab.say(1, "cancel", runs=[ONE])


def test_everybody_is_told_of_a_change_and_of_why(lab: Lab) -> None:
    lab.say(1, "watch")
    set_policy(lab, ProportionalShare({"a": 2.0}))
    told = [client.of("policy")[-1] for client in lab.clients]
    assert told[0] == told[1]
    assert unpack(ProportionalShare, told[0]["policy"]) == ProportionalShare({"a": 2.0})
    assert (told[0]["owner"], told[0]["client"]) == ("kernel-1", "kernel-1")
    assert lab.clients[0].of("answered")[-1] == {"id": 4, "failure": None}
    set_policy(lab, RemotePolicy("Mine", 1))
    told = [client.of("policy")[-1] for client in lab.clients]
    assert (told[1]["policy"], told[1]["name"], told[1]["owner"]) == (None, "Mine", "kernel-1")
    set_policy(lab, FIFO(), Failure("policy", "no"))
    told = [client.of("policy")[-1] for client in lab.clients]
    assert (told[1]["name"], unpack(Failure, told[1]["failure"]).message) == ("FIFO", "no")
    assert lab.asked[-1] == ("keep", FIFO())
    kinds = [r.args for r in lab.records() if isinstance(r, Event) and r.kind == "policy"]
    assert [a["policy"] for a in kinds][1:] == ["Mine", "FIFO()"]
    assert kinds[-1]["message"] == "no"


def test_an_answer_that_changes_nothing_goes_to_who_asked(lab: Lab) -> None:
    lab.rim.policy_refused("kernel-2", 8, Failure("policy", "it loops"))
    (told,) = lab.clients[1].of("answered")
    assert (told["id"], unpack(Failure, told["failure"]).message) == (8, "it loops")
    assert not any(client.of("policy") for client in lab.clients)


def test_code_of_a_clients_own_is_tried_and_not_looked_into(lab: Lab) -> None:
    before = len(lab.core.events)
    lab.say(1, "policy", b"code", id=3, name="Mine")
    assert lab.asked == [("try", "kernel-1", 3, "Mine", b"code")]
    with pytest.raises(Malformed):
        lab.say(1, "policy", b"code", id="three", name="Mine")
    assert len(lab.core.events) == before, "the core hears of it when it was tried"


def test_a_question_of_the_core_goes_to_the_policy(lab: Lab) -> None:
    lab.core.answer = lambda event: [m.AskPolicy("c", 1, 17, PolicyView(0.0, ()))]
    lab.say(1, "cancel", runs=[ONE])
    assert lab.asked == [("ask", 17)]


def test_clients_are_called_as_they_ask_to_be(lab: Lab) -> None:
    ann = lab.rim.new_client("ann", 9)
    assert (ann.name, ann.number) == ("ann", 3)
    lab.rim.client_joined(ann, Peer())
    assert lab.clients[0].of("topology")[-1]["clients"] == ["kernel-1", "kernel-2", "ann"]
    lab.rim.client_left("ann", "gone")
    assert lab.clients[0].of("topology")[-1]["clients"] == ["kernel-1", "kernel-2"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kernel-1", "a name that the lab gives itself"),
        ("kernel-99", "a name that the lab gives itself"),
        ("control", "a name that the lab gives itself"),
        ("island0/host1", "letters, digits"),
        ("x" * 41, "1 to 40"),
        ("ann", r"connected already \(process 9\)"),
    ],
)
def test_names_that_cannot_be(lab: Lab, name: str, words: str) -> None:
    lab.rim.client_joined(lab.rim.new_client("ann", 9), Peer())
    with pytest.raises(ValueError, match=words):
        lab.rim.new_client(name, 1)


def test_watchers_that_do_not_read_are_told_what_they_missed(lab: Lab) -> None:
    lab.say(1, "watch")
    lab.say(2, "watch")
    lab.clients[0].sent.clear()
    lab.clients[0].pending = 1 << 30
    submitted(lab)
    lab.rim.diary.flush()
    assert not lab.clients[0].of("records")
    lab.clients[0].pending = 0
    lab.say(1, "drop", buffers=[])
    submitted(lab)
    records = lab.records()
    (dropped,) = [r for r in records if not isinstance(r, Event)]
    assert dropped.name == "dropped"  # type: ignore[union-attr]
    assert dropped.value > 3  # type: ignore[union-attr]
    assert lab.flushes == 2


def test_nobody_who_is_gone_stops_the_others(lab: Lab) -> None:
    lab.hosts["i0/h"].gone = True
    submitted(lab)
    assert lab.hosts["i1/h"].of("grant")


def test_the_core_hears_the_time_when_it_wants_to_and_else_never(lab: Lab) -> None:
    lab.core.answer = lambda event: [m.FreeBuffers(event.cause, ("i0/h",), (ONE + 3,))]
    lab.core.due = lab.now + 10
    before = len(lab.core.events)
    lab.rim.look()
    assert len(lab.core.events) == before
    lab.now += 10
    lab.rim.look()
    (event,) = lab.core.events[before:]
    assert isinstance(event, m.PatienceEnded)
    assert event.time >= lab.core.due
    assert lab.hosts["i0/h"].of("free") == [{"buffers": (ONE + 3,)}]
