"""Lanes: order, bounded flight, stamps, survival; and devices that behave like devices."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from pathways_lab.core.program.layout import Layout
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import emulated as emulated_module
from pathways_lab.runtime.devices import CpuRuntime, Place
from pathways_lab.runtime.emulated import emulated
from pathways_lab.runtime.host.device_queues import IN_FLIGHT, Lanes
from tests.runtime.processes import until


class Scripted:
    """A job that ends when told to."""

    def __init__(self, log: list[str], name: str, *, devices: tuple[int, ...] = (0,)) -> None:
        self.log, self.name, self.devices = log, name, devices
        self.may_end = threading.Event()
        self.started = threading.Event()
        self.ended = threading.Event()
        self.begun = 0.0

    def start(self) -> None:
        self.log.append(f"start {self.name}")
        self.started.set()

    def rest(self) -> None:
        return None

    def ready(self) -> bool:
        return self.may_end.is_set()

    def wait(self) -> None:
        assert self.may_end.wait(10)

    def over(self, start: float) -> None:
        self.log.append(f"over {self.name}")
        self.begun = start
        self.ended.set()


@pytest.fixture
def clock() -> Callable[[], float]:
    """It ticks when somebody looks at it: threads on unlike processors agree about the order."""
    return functools.partial(next, itertools.count(1.0))


@pytest.fixture
def lanes(clock: Callable[[], float]) -> Any:
    deaths: list[BaseException] = []
    made = Lanes(deaths.append, clock=clock)
    yield made
    made.close()
    assert deaths == []


def test_starts_and_ends_keep_their_order(lanes: Lanes) -> None:
    log: list[str] = []
    jobs = [Scripted(log, str(n)) for n in range(3)]
    for job in jobs:
        lanes.put("a", job)
    for job in reversed(jobs):
        job.may_end.set()
    assert jobs[2].ended.wait(10)
    assert [entry for entry in log if entry.startswith("start")] == [
        "start 0",
        "start 1",
        "start 2",
    ]
    assert [entry for entry in log if entry.startswith("over")] == ["over 0", "over 1", "over 2"]


def test_the_oldest_gang_of_a_lane_is_known_until_it_is_over(lanes: Lanes) -> None:
    """Also when nobody uses the lane any more."""
    log: list[str] = []
    first, second = Scripted(log, "a"), Scripted(log, "b")
    assert lanes.find("x") is None
    lanes.put("x", first)
    lanes.put("x", second)
    lane = lanes.find("x")
    assert lane is not None
    lanes.drop("x")
    assert lane.oldest is first
    first.may_end.set()
    assert first.ended.wait(10)
    assert lane.oldest is second
    second.may_end.set()
    assert second.ended.wait(10)
    assert lane.oldest is None


def test_flight_is_bounded(lanes: Lanes) -> None:
    log: list[str] = []
    jobs = [Scripted(log, str(n)) for n in range(IN_FLIGHT + 2)]
    for job in jobs:
        lanes.put("a", job)
    other = Scripted(log, "other")
    lanes.put("b", other)
    other.may_end.set()
    assert other.ended.wait(10)  # another lane is not held up
    assert log.count(f"start {IN_FLIGHT}") == 0
    for job in jobs:
        job.may_end.set()
    assert jobs[-1].ended.wait(10)


def test_ends_on_other_devices_are_seen_when_they_come(lanes: Lanes) -> None:
    """One launching thread for all devices of an accelerator host, but nobody's end is late."""
    log: list[str] = []
    slow, fast = Scripted(log, "slow", devices=(0,)), Scripted(log, "fast", devices=(1,))
    lanes.put("host", slow)
    lanes.put("host", fast)
    fast.may_end.set()
    assert fast.ended.wait(10)
    assert not slow.ended.is_set()
    slow.may_end.set()
    assert slow.ended.wait(10)


def test_ends_are_seen_while_the_launching_thread_waits_for_room_on_other_devices(
    lanes: Lanes,
) -> None:
    """Else what waits for them elsewhere could be what that thread waits for."""
    log: list[str] = []
    for _ in range(2):  # the second time these devices are known
        fast = Scripted(log, "fast", devices=(1,))
        slow = [Scripted(log, str(n)) for n in range(IN_FLIGHT + 1)]
        lanes.put("host", fast, *slow)
        assert slow[IN_FLIGHT - 1].started.wait(10)
        fast.may_end.set()
        assert fast.ended.wait(10)
        assert not slow[IN_FLIGHT].started.is_set()
        for job in slow:
            job.may_end.set()
        assert slow[-1].ended.wait(10)


def test_what_was_not_launched_of_a_job_is_known_until_it_is_over(lanes: Lanes) -> None:
    log: list[str] = []
    first, second = Scripted(log, "first"), Scripted(log, "second")
    first.rest = lambda: second  # type: ignore[assignment, method-assign, return-value]
    lanes.put("x", first)
    assert second.started.wait(10)
    first.may_end.set()
    assert first.ended.wait(10)
    lane = lanes.find("x")
    assert lane is not None
    assert lane.oldest is second
    second.may_end.set()
    assert second.ended.wait(10)
    assert lane.oldest is None


def test_a_lane_with_nothing_to_do_keeps_no_job(lanes: Lanes) -> None:
    """Its arrays would keep their memory until the next gang."""
    job = Scripted([], "a")
    kept, ended = weakref.ref(job), job.ended
    job.may_end.set()
    lanes.put("x", job)
    assert ended.wait(10)
    del job
    until(lambda: kept() is None, 10)


def test_a_gang_begins_when_its_devices_are_free(lanes: Lanes, clock: Callable[[], float]) -> None:
    log: list[str] = []
    first, second = Scripted(log, "1", devices=(0, 1)), Scripted(log, "2", devices=(1, 2))
    before = clock()
    lanes.put("a", first)
    lanes.put("b", second)
    assert first.started.wait(10)
    assert second.started.wait(10)
    launched = clock()
    first.may_end.set()
    assert first.ended.wait(10)
    second.may_end.set()
    assert second.ended.wait(10)
    assert before < first.begun < launched < second.begun


@pytest.mark.parametrize("where", ["start", "wait", "over"])
def test_a_dead_lane_is_told(where: str) -> None:
    """What goes wrong with a gang is noted with it: whatever a job raises is a bug."""
    deaths: list[BaseException] = []
    dead = threading.Event()
    lanes = Lanes(lambda error: (deaths.append(error), dead.set()))

    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    job = Scripted([], "x")
    setattr(job, where, bug)
    job.may_end.set()
    lanes.put("a", job)
    assert dead.wait(10)
    assert str(deaths[0]) == "a bug"


# --- devices that behave like devices -----------------------------------------------------


class Sleep:
    """A gang of ``emulated(ms)`` on a slice."""

    def __init__(self, place: Place, ms: float, ends: threading.Semaphore) -> None:
        layout = Layout((("x", len(place.devices)),), (("x",),))
        cut = place.sharding(layout)
        struct = jax.ShapeDtypeStruct((len(place.devices),), np.float32, sharding=cut)
        self.call = jax.jit(emulated(ms), out_shardings=cut).lower(struct).compile()
        self.input = jax.device_put(np.ones(len(place.devices), np.float32), cut)
        self.devices = place.locals
        self.ends = ends

    def start(self) -> None:
        self.made = self.call(self.input)

    def rest(self) -> None:
        return None

    def ready(self) -> bool:
        return bool(self.made.is_ready())

    def wait(self) -> None:
        self.made.block_until_ready()

    def over(self, start: float) -> None:
        self.ends.release()


def wall(
    lanes: Lanes, runtime: CpuRuntime, slices: list[tuple[int, ...]], ms: float, most: float
) -> float:
    """Milliseconds for one gang per entry, each on the devices that it names.

    The shortest of so many times as it takes: a busy machine only makes them longer.
    """
    ends = threading.Semaphore(0)
    work = []
    for number, devices in enumerate(slices):
        owned = tuple(("h", d) for d in devices)
        binding = SliceBinding(number, "k", "i", (len(devices),), ("x",), owned, "cpu")
        place = runtime.open(binding)
        work.append((runtime.lane(binding), Sleep(place, ms, ends)))
    best = 1e9
    for _ in range(30):
        start = time.monotonic()
        for lane, job in work:
            lanes.put(lane, job)
        for _ in work:
            assert ends.acquire(timeout=20)
        best = min(best, (time.monotonic() - start) * 1e3)
        if best < most:
            break
    return best


@pytest.mark.skipif(emulated_module.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([(0,), (1,), (2,), (3,)], 1),
        ([(0,), (0,)], 2),
        ([(0, 1), (2, 3)], 1),
        ([(0, 1, 2, 3), (0, 1, 2, 3)], 2),
        ([(0,), (1, 2, 3)], 1),
        ([(0, 1), (2,), (3,)], 1),
    ],
)
def test_devices_behave_like_devices(
    lanes: Lanes, slices: list[tuple[int, ...]], expected: int
) -> None:
    """50 ms gangs on disjoint devices take 50 ms together, on the same ones 100 ms."""
    most = 50 * expected + 25
    took = wall(lanes, CpuRuntime("h", 4), slices, 50, most)
    assert 50 * expected - 1 < took < most


@pytest.mark.skipif(emulated_module.compiler() is None, reason="no C++ compiler")
def test_one_client_for_all_would_not_behave_like_devices(lanes: Lanes) -> None:
    """Why every footprint has its own client: on one, disjoint gangs wait for each other."""
    runtime = CpuRuntime("h", 4)
    every = runtime.open(
        SliceBinding(9, "k", "i", (4,), ("x",), tuple(("h", d) for d in range(4)), "cpu")
    )

    class Shared(CpuRuntime):
        def open(self, binding: SliceBinding) -> Place:
            return Place(binding, "h", every.footprint)

    assert wall(lanes, Shared("h", 4), [(0, 1), (2, 3)], 20, 30) > 38


class Links:
    """What a lane reads while it has nothing to launch: here jobs come in its own thread.

    awake: it looks until something has ended, and only then sleeps.
    """

    def __init__(self, awake: bool = False) -> None:
        self.awake = awake
        self.arrives: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.readers: set[str] = set()
        self.led = self.taken_back = 0

    def lead(self, done: Any, timeout: None = None, watch: Any = None) -> bool:
        self.readers.add(threading.current_thread().name)
        self.led += 1
        while not done():
            if self.awake:
                self.awake = not watch.look()
                continue
            watch.leave()
            arrived = self.arrives.get()
            if arrived is not None:
                arrived()
        return True

    def nudge(self) -> None:
        self.arrives.put(None)

    def take_back(self) -> None:
        self.taken_back += 1


def test_a_lane_that_has_nothing_to_launch_reads_the_links() -> None:
    deaths: list[BaseException] = []
    links, log = Links(), []
    lanes = Lanes(deaths.append, links)
    first, second, third = (Scripted(log, name) for name in "123")
    for job in (first, second, third):
        job.may_end.set()
    lanes.put("a", first)
    assert first.ended.wait(10)
    links.arrives.put(lambda: lanes.put("a", second))
    assert second.ended.wait(10)
    lanes.put("a", third)
    assert third.ended.wait(10)
    lanes.close()
    assert links.readers == {"lane a"}
    assert [entry for entry in log if entry.startswith("start")] == [
        "start 1",
        "start 2",
        "start 3",
    ]
    assert deaths == []


@pytest.mark.parametrize("awake", [True, False])
def test_the_thread_that_looks_for_messages_sees_ends_until_it_sleeps(awake: bool) -> None:
    links = Links(awake)
    lanes = Lanes(lambda _: None, links)
    seen: list[str] = []
    jobs = [Scripted([], name) for name in "12"]
    for job in jobs:
        job.over = (  # type: ignore[method-assign]
            lambda start, job=job: (seen.append(threading.current_thread().name), job.ended.set())
        )
        lanes.put("a", job)
        assert job.started.wait(10)
        time.sleep(0.01)  # it was not over at once
        job.may_end.set()
        assert job.ended.wait(10)
    lanes.close()
    assert seen == ["lane a" if awake else "ends of a", "ends of a"]


def test_a_lane_that_was_busy_leaves_the_links_to_others() -> None:
    links = Links()
    lanes = Lanes(lambda _: None, links)
    slow = Scripted([], "slow")
    slow.start = lambda: time.sleep(0.01)  # type: ignore[method-assign,assignment]
    slow.wait = lambda: None  # type: ignore[method-assign]
    slow.may_end.set()
    for _ in range(2):
        slow.ended.clear()
        lanes.put("a", slow)
        assert slow.ended.wait(10)
    until(lambda: links.taken_back > 0)
    lanes.close()


def test_a_lane_that_was_busy_once_may_be_so_again() -> None:
    """What reads in its place comes late after a surprise: there are few of them."""
    links = Links()
    lanes = Lanes(lambda _: None, links)

    def launch(*seconds: float) -> int:
        before = links.taken_back
        for each in seconds:
            led = links.led
            job = Scripted([], "job")
            job.start = functools.partial(time.sleep, each)  # type: ignore[method-assign,assignment]
            job.wait = lambda: None  # type: ignore[method-assign]
            job.may_end.set()
            lanes.put("a", job)
            until(lambda: links.led > led)  # noqa: B023
        return links.taken_back - before

    launch(0.0, 0.0, 0.02)
    assert launch(*[0.0] * 8) == 8
    launch(*[0.0] * 50)
    until(lambda: not launch(0.0, 0.0, 0.0))
    lanes.close()
