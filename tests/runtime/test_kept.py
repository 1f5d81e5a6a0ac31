"""What is kept, and for how long: nothing of what is over, and records within a bound."""

from __future__ import annotations

import os
import queue
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pathways_lab.core import messages as m
from pathways_lab.core.messages import ProgramsForgotten
from pathways_lab.core.program.folding import folded
from pathways_lab.core.program.program import Call, Line, Plan
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.executor.launcher import Launcher
from pathways_lab.runtime.control_plane.record_stream import Broadcast
from pathways_lab.runtime.devices import CpuRuntime, Footprint, Place
from pathways_lab.runtime.host.compiler import Compiler
from pathways_lab.runtime.host.driver import HostRim
from pathways_lab.runtime.host.host_loop import Lap
from pathways_lab.runtime.host.host_records import Story
from pathways_lab.runtime.host.local_slices import Tenants
from pathways_lab.runtime.host.segment_job import Ends, Work
from pathways_lab.runtime.host.user_output import Output
from pathways_lab.runtime.processes.heaps import heaps
from pathways_lab.timeline.compiling import Compiling, Making
from pathways_lab.timeline.entries import Entries
from pathways_lab.timeline.records import Event, Sample, Span
from pathways_lab.timeline.records_of import Placing
from pathways_lab.transport import record_encoding
from pathways_lab.transport.codec import pack, pack_fields
from tests.runtime import host_kit, launch_kit
from tests.runtime.launch_kit import HOST, PlanBuilder
from tests.runtime.rim_kit import ONE, Lab, Peer, announcement, submitted


def test_every_host_that_heard_of_a_slice_hears_of_its_end() -> None:
    """Also one that has no device of it, and knows it as the other end of a transfer."""
    lab = Lab()
    submitted(lab)  # i0/h got a program that moves something between ONE and ONE + 1
    lab.core.answer = lambda event: [m.SliceFreed("c", ("i1/h",), ONE + 1)]
    lab.say(1, "release-slice", slice=ONE + 1)
    for host in lab.hosts.values():
        assert host.of("unbind") == [{"slice": ONE + 1}]
    assert ONE + 1 not in lab.rim.registry.told


def test_what_was_noted_of_a_slice_s_programs_goes_with_it() -> None:
    lab = Lab()
    submitted(lab)
    assert lab.rim.diary._placings
    lab.core.answer = lambda event: [m.SliceFreed("c", ("i0/h",), ONE)]
    lab.say(1, "release-slice", slice=ONE)
    assert not lab.rim.diary._placings
    assert not lab.rim.registry.plans


def test_what_no_run_needs_goes_from_hosts_and_control_plane() -> None:
    """In its turn, and code only when nothing else was announced with it."""
    lab = Lab()
    for slice_id in (ONE, ONE + 1):
        lab.say(1, "function", b"code", **announcement(slice_id))
    submitted(lab)
    assert lab.rim.diary._placings
    registry = lab.rim.registry

    def forget(plans: tuple[str, ...], functions: tuple[tuple[str, int], ...]) -> None:
        lab.core.answer = lambda event: [ProgramsForgotten("c", ("i0/h",), plans, functions)]
        lab.say(1, "forget", plans=plans, functions=functions)

    forget(("plan",), (("f", ONE),))
    assert lab.hosts["i0/h"].sent[-1][0] == "forget"
    assert lab.hosts["i0/h"].of("forget") == [{"plans": ("plan",), "functions": (("f", ONE),)}]
    assert not registry.plans
    assert not lab.rim.diary._placings
    assert list(registry.functions) == [("f", ONE + 1)]
    assert list(registry.blobs) == [(1, "f")]
    forget((), (("f", ONE + 1),))
    assert not registry.functions
    assert not registry.blobs


def test_a_launcher_knows_nothing_of_what_it_was_told_to_forget() -> None:
    launcher = Launcher(HOST, "island0")
    launcher.bind(launch_kit.binding(1, 0), "lane")
    builder = PlanBuilder("p").call(1, "f", ["x"], ["y"]).call(1, "f", ["y"], ["z"])
    plan = builder.plan(["x"], ["z"])
    launcher.program(plan)
    launcher.needs("f", 1, 8)
    launcher.launches_alone("g", 1)
    launcher.first_launches_alone("g", 1)
    launcher.grant(launch_kit.grant(1, plan, inputs=(None,), outputs=(5,)), {0: object()})
    book, segments = launcher._book, launcher._segments
    assert book._plans
    assert book._readings
    assert segments._stretches
    launcher.forget(["p"], [("f", 1), ("g", 1)])
    assert not (segments.temporary)
    assert not (segments.alone)
    assert not (segments.first_alone)
    assert not (book._plans)
    assert not (book._readings)
    assert not (segments._stretches)


def test_compiled_code_goes_with_the_last_slice_of_its_devices_that_wants_it() -> None:
    """Also when it was let go before it was compiled."""
    posted: queue.Queue[Any] = queue.Queue()
    told: list[int] = []
    compiler = Compiler(HOST, Output(lambda *_: None), lambda error: None)
    driver: Any = SimpleNamespace(
        post=lambda call, *args: call == driver.compiling or posted.put((call, *args)),
        opened=lambda slice_id: [],
        compiled=lambda binding, code, *_: told.append(code.slice),
        compiling=lambda *_: None,
    )
    lanes: Any = SimpleNamespace(drop=lambda lane: None)
    tenants = Tenants(HOST, CpuRuntime(HOST, 1), Launcher(HOST, "island0"), compiler, lanes, driver)
    one, two = host_kit.binding(1, (1,), [0]), host_kit.binding(2, (1,), [0])
    kind, whole = ((4,), "float32"), host_kit.layout(one, None)
    code = host_kit.code(lambda x: (x + 1,), one, [(kind, whole)], [(kind, whole)])

    def work(times: int) -> None:
        for _ in range(times):
            call, *args = posted.get(timeout=60)
            call(*args)

    tenants.bind(one)
    tenants.bind(two)
    work(2)
    place = tenants.place(1)
    codes = [code, replace(code, slice=2)]
    for each in codes:
        tenants.prepare(each)
    work(2)
    assert (sorted(told), compiler.compilations) == ([1, 2], 1)
    tenants.forget([(code.function, 1)])
    assert not tenants[1].executables
    assert len({*place.footprint.executables.values()}) == 1, "the other slice has it"
    tenants.forget([(code.function, 2)])
    assert not place.footprint.executables
    tenants.prepare(code)
    tenants.forget([(code.function, 1)])
    work(1)
    assert not tenants[1].executables
    assert not place.footprint.executables
    assert len(told) == 2
    tenants.prepare(code)
    work(1)
    assert list(tenants[1].executables) == [code.function], "it is as good as before"
    compiler.close()


def test_late_watchers_get_what_fits_into_a_bound_of_bytes() -> None:
    log = Broadcast(capacity=10, nbytes=10_000)
    small, large = (
        record_encoding.write(Event("output", 0.0, args={"text": "x" * size})) for size in (1, 2000)
    )
    for _ in range(8):
        log.add([large])
    log.add([small] * 3)
    peer = Peer()
    log.watch("late", peer, 1.0)
    (sent,) = peer.of("records")
    dropped, *kept = record_encoding.read(sent["records"])
    assert isinstance(dropped, Sample)
    assert (dropped.name, dropped.value, len(kept)) == ("dropped", 4.0, 7)
    assert 9 * len(small) < sum(map(len, sent["records"])) <= 10_000 + 100


def ended(step: int, opens: bool, count: int = 1, announced: int = 0) -> record_encoding.Ended:
    about = record_encoding.about("p", "f", "kernel-1", "a.py:1: f(x)", 7, (0, 1))
    columns = ([4.0] * count, [5.0] * count, [6.0] * count, [7.0] * count)
    return record_encoding.Ended(
        [about] * count, 9, step, 40 + step, (), announced, opens, (0.0, 1.0, 2.0, 3.0), columns
    )


def entries() -> list[bytes]:
    """One of each form."""
    gangs = tuple((n, n, "f", 7, "a.py:1: f(x)", ("h",)) for n in range(3))
    return [
        record_encoding.write(Event("submitted", 1.0, run=9)),
        record_encoding.write(Sample("memory", 1.0, 5.0)),
        record_encoding.write(Span("compile", 1.0, 2.0, "i", "h")),
        record_encoding.segments("i", "h", True, [ended(n, n == 0) for n in range(4)], 0.5),
        record_encoding.segments("i", "h", True, [ended(0, False, 5, announced=5)], 0.5),
        record_encoding.places(
            (1.0, 9, 0, 40), record_encoding.placing(Placing("i", "p", "c", gangs))
        ),
        record_encoding.messages([(1.0, "grant", "control", ("h", "k"), 100, 9, "p")] * 6),
    ]


def test_how_many_records_an_entry_holds_is_known_without_reading_it() -> None:
    looked = [record_encoding.look(entry) for entry in entries()]
    assert [kind for kind, _ in looked] == ["submitted", "memory", "compile", "", "", "", ""]
    for (_, least), entry in zip(looked, entries(), strict=True):
        there = len(record_encoding.read([entry]))
        assert there / 2 < least <= there


def test_unread_entries_are_bounded_by_their_records() -> None:
    """Else a client that never looks would keep many times what its timeline holds."""
    kept = Entries(capacity=100)
    (messages,) = entries()[-1:]
    for _ in range(1000):
        kept.add([messages], record_encoding.look(messages)[1])
    held, version, missed = kept.since(0)
    there = sum(records for _, records in held)
    assert (version, missed) == (1000 * record_encoding.look(messages)[1], version - there)
    assert 80 < len(record_encoding.read([entry for batch, _ in held for entry in batch])) <= 100


def test_device_processes_have_heaps_for_their_threads_unless_a_user_wants_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    for processors, heap in ((1, "8"), (2, "16"), (16, "32")):
        monkeypatch.setattr(
            "pathways_lab.transport.machine_share.os.cpu_count", lambda n=processors: n
        )
        monkeypatch.setattr(
            "pathways_lab.transport.machine_share.os.sched_getaffinity",
            lambda _, n=processors: range(n),
        )
        assert heaps()["MALLOC_ARENA_MAX"] == heap
    monkeypatch.setitem(os.environ, "MALLOC_ARENA_MAX", "7")
    assert heaps()["MALLOC_ARENA_MAX"] == "7"
    monkeypatch.setitem(os.environ, "GLIBC_TUNABLES", "glibc.malloc.tcache_count=3")
    assert heaps()["GLIBC_TUNABLES"].endswith(":glibc.malloc.tcache_count=3")


def test_what_a_host_noted_of_a_program_goes_with_it() -> None:
    story = Story("i/h", "i", True, lambda: 0.0)
    plans = {key: Plan(key, "p", (), (), (), (), ()) for key in ("old", "new")}
    call = Call("f", 7, (), (), name="f")
    bound = SliceBinding(7, "kernel-1", "i", (1,), ("x",), (("i/h", 0),), "cpu")
    place = Place(bound, "i/h", Footprint("lane", {("i/h", 0): object()}))
    for plan in plans.values():
        assert story.about(plan, 0, call, place) is story.about(plan, 0, call, place)
    del plans["old"]
    story.forget(lambda key: key not in plans)
    assert list(story._about) == ["new"]


def test_what_a_host_begins_to_compile_is_told_with_its_line() -> None:
    bound = SliceBinding(7, "kernel-1", "i", (1,), ("x",), (("i/h", 0),), "cpu")
    code: Any = SimpleNamespace(name="f", function="k", slice=7, line=Line("a.py", 3, "def f(x):"))
    told = Story("i/h", "i", True, lambda: 0.5).compiling(bound, code, 1.0, 2)
    making = Compiling()
    making.add(told)
    assert making.now() == Making("f", 1, 3, 1.5, "a.py:3: def f(x):")


def test_each_lap_of_a_loop_is_told_as_a_gang() -> None:
    story = Story("i/h", "i", True, lambda: 0.5)
    call = Call("f", 7, (), (), name="f")
    bound = SliceBinding(7, "kernel-1", "i", (1,), ("x",), (("i/h", 0),), "cpu")
    plan = Plan("key", "p", (), (), (), (), ())
    parts = [SimpleNamespace(index=0, call=call)]
    job: Any = SimpleNamespace(
        segment=SimpleNamespace(
            plan=plan, run=SimpleNamespace(id=9), seq=40, stamp=Work(0.0, 0.1, 0.2)
        ),
        parts=parts, place=Place(bound, "i/h", Footprint("lane", {("i/h", 0): object()})),
        announced=1, handed=0.3,
        laps=[Lap(n, 1, n + 1.0, n + 1.1, n + 1.2, n + 1.9) for n in (0, 1)],
    )  # fmt: skip
    ended = story.ended(job, Ends(0, [1.0], [1.1], [1.2], [2.9], {}), [])
    records = record_encoding.read([story.segments(ended)])
    spans = [(r.kind, r.step, r.start, r.end) for r in records if isinstance(r, Span)]
    assert len(spans) == len(records), "the loop itself was said to be launched"
    assert spans == [
        ("receive", 0, 0.5, 0.6), ("prepare", 0, 0.6, 0.7), ("launch", 0, 1.5, 1.6),
        ("gang", 0, 1.7, 2.4), ("launch", 1, 2.5, 2.6), ("gang", 1, 2.7, 3.4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("unbind", {"slice": 1}),
        ("move", {"binding": pack(replace(launch_kit.binding(1, 1), generation=1))}),
        ("forget", {"plans": ["p"], "functions": []}),
    ],
)
def test_a_host_forgets_what_it_noted_of_programs_when_they_go(
    op: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a host takes it
    ended: list[str] = []
    listen = f"unix:{tmp_path}/data"
    host = HostRim(HOST, "island0", CpuRuntime(HOST, 2), b"k" * 32, listen, ended.append)
    bound = launch_kit.binding(1, 0)
    plan = PlanBuilder("p").call(1, "f", ["x"], ["y"]).plan(["x"], ["y"])
    host._from_control["program"](host, {"bindings": [pack(bound)], "plan": pack(folded(plan))}, [])
    call = plan.steps[0].node
    assert isinstance(call, Call)
    place = Place(bound, HOST, Footprint("lane", {(HOST, 0): object()}))
    host._story.about(plan, 0, call, place)
    host._from_control[op](host, fields, [])
    assert not host._story._about
    host.compiler.close()
    host.reactor.close()
    assert not ended


def test_idle_is_counted_from_the_end_of_work_and_not_from_its_beginning() -> None:
    lab = Lab()
    submitted(lab)
    lab.now += 100
    assert lab.rim.idle() == 0.0
    lab.rim.look()
    lab.core.answer = lambda event: [m.RunEnded("c", "kernel-1", ONE + 9, "finished")]
    lab.rim.from_host("i0/h", "report", pack_fields(m.HostReport(0, "", "", parked=(ONE,))), [], 1)
    assert 0 < lab.rim.idle() < 1
    lab.now += 10
    lab.rim.look()
    assert 10 < lab.rim.idle() < 11
    lab.say(2, "topology")
    assert lab.rim.idle() < 1
