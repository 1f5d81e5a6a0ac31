"""Feeds: elements made by Dask tasks, on one real lab; and what the core does with such uploads."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import distributed
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.feeds import feed_tasks, worker_tasks
from pathways_lab.client.feeds.feed_tasks import Described, HostTasks, _Task
from pathways_lab.core.errors import Failure
from pathways_lab.runtime.cluster import dask_private
from pathways_lab.runtime.cluster.feed_worker import FEEDS
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=1, hosts_per_island=1, devices_per_host=2, platform="cpu") as started:
        yield started


def tasks(lab: pw.Lab) -> list[Any]:
    """Host computations that the timeline has heard of."""
    return [r for r in lab.timeline.records if getattr(r, "kind", "") == "host-computation"]


def buffers(lab: pw.Lab) -> int:
    """Buffers that this client has on the lab."""
    lab.session.connection.flush(drops=True)
    return len(lab.session.connection._buffers)


def test_values_in_order_on_their_devices_and_never_more_ahead_than_asked(
    lab: pw.Lab, tmp_path: Path
) -> None:
    s = lab.slice(2, "data")
    folder = str(tmp_path)

    def make(step: int) -> dict[str, Any]:
        open(f"{folder}/{step}", "w").close()
        return {"x": np.full((4, 3), step, np.float64), "pid": np.int32(os.getpid())}

    def made() -> set[int]:
        return {int(name) for name in os.listdir(folder)}

    total = pw.jit(lambda w, x: w + x.sum(), on=s)
    uploads = lab.session.connection.traffic.uploads
    with lab.feed(make, {"x": s.sharding(P("data")), "pid": s}, prefetch=2, steps=9) as feed:
        first = next(feed)
        assert first["x"].sharding == s.sharding(P("data"))
        assert first["x"].dtype == np.float32
        until(lambda: made() == {0, 1, 2})
        time.sleep(0.2)
        assert made() == {0, 1, 2}  # one taken, two ahead
        w = total(np.float32(0), first["x"])
        seen = [float(first["x"].result()[0, 0])]
        for number, element in enumerate(feed, 1):
            assert max(made()) <= number + 2
            seen.append(float(element["x"].result()[3, 2]))
            w = total(w, element["x"])
        assert seen == list(range(9))
        assert float(w) == 12 * sum(range(9))
        where = int(element["pid"])
    assert lab.embedded is not None
    assert where not in {os.getpid(), *(p for pids in lab.embedded.pids.values() for p in pids)}
    assert lab.session.connection.traffic.uploads == uploads  # nothing went through this kernel
    until(lambda: len(tasks(lab)) == 9)
    assert {r.host for r in tasks(lab)} == {"feed/1"}
    del first, element
    with pytest.raises(pw.PathwaysError, match="feed was closed"):
        next(feed)
    s.release()


def test_the_loop_is_held_back_by_runs_that_have_not_read(lab: pw.Lab) -> None:
    s = lab.slice(1)
    slow = pw.jit(lambda w, x: pw.emulated(60)(w + x), on=s)
    feed = lab.feed(lambda step: np.float32(step), s, prefetch=2, steps=12)
    w = slow(np.float32(0), next(feed)).block_until_ready()
    start = time.monotonic()
    for x in feed:
        w = slow(w, x)
        del x
        # What is taken and not read yet: no more than asked for, and the newest.
        assert len(lab.session.connection.runs) <= 4
    dispatched = time.monotonic() - start
    assert float(w) == sum(range(12))
    assert dispatched > 0.3  # 11 steps of 60 ms, of which at most four were left
    feed.close()
    s.release()


def test_a_failure_is_that_of_its_readers_and_tells_the_users_line(lab: pw.Lab) -> None:
    s = lab.slice(1)
    twice = pw.jit(lambda x: 2 * x, on=s)

    def make(step: int) -> Any:
        time.sleep(0.1)
        if step == 2:
            raise ValueError("no such picture")
        return np.full(5 if step == 4 else 3, step, np.float32)

    twice(np.zeros(3, np.float32)).block_until_ready()
    for _ in range(2):  # calls that come alike again may travel together: not these
        with lab.feed(make, s, prefetch=5, steps=6, name="pictures") as feed:
            results = [twice(element) for element in feed]
            told: list[str] = []
            for step, result in enumerate(results):
                if step in (2, 4):
                    with pytest.raises(pw.PathwaysError) as error:
                        result.result()
                    told.append(str(error.value))
                    details = error.value.failure.details
                    if step == 2:
                        assert "raise ValueError" in details
                else:
                    assert result.result().tolist() == [2 * step] * 3
    assert "element 2 of pictures" in told[0]
    assert "ValueError: no such picture" in told[0]
    assert "test_feed.py" in told[0]
    assert "element 4 of pictures is the array float32[5]" in told[1]
    assert "first one was the array float32[3]" in told[1]
    assert "test_feed.py" in told[1]
    s.release()


def test_what_was_taken_still_comes_and_nothing_stays(lab: pw.Lab) -> None:
    s = lab.slice(1)

    def make(step: int) -> Any:
        time.sleep(0.2)
        return np.int32([step, os.getpid()])

    held = [next(lab.feed(make, s, prefetch=3))]  # a feed that goes without a word
    with lab.feed(make, s, prefetch=3) as feed:
        held += [next(feed), next(feed)]
        left = feed
    assert [int(value.result()[0]) for value in held] == [0, 0, 1]
    assert "closed" in repr(left)
    held.clear()
    until(lambda: buffers(lab) == 0)
    until(lambda: not lab._host_tasks._tasks and not lab._host_tasks._sources)
    until(lambda: lab.accounts().total.nbytes == 0)
    s.release()


def test_an_element_that_was_read_is_recorded_though_its_feed_has_ended(lab: pw.Lab) -> None:
    """Dask's word that a task is over may come after everything that was done with its element."""
    s = lab.slice(1)

    def make(step: int) -> Any:
        worker = worker_tasks._worker

        def late() -> str:  # called when all hosts have the element
            worker_tasks._worker = worker
            time.sleep(0.5)
            return worker()

        if step == 1:
            worker_tasks._worker = late
        return np.int32(step)

    with lab.feed(make, s, prefetch=0, steps=2, name="late") as feed:
        assert [int(value.result()) for value in feed] == [0, 1]
    until(lambda: [r.args["step"] for r in tasks(lab) if r.program == "late"] == [0, 1])
    until(lambda: buffers(lab) == 0 and not lab._host_tasks._tasks)
    until(lambda: lab.accounts().total.nbytes == 0)
    s.release()


def test_a_result_that_dask_waits_for_in_vain_is_asked_for_anew(
    lab: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its worker has died before it was asked: Dask tries for half a minute to reach it."""
    s = lab.slice(1)
    result = distributed.Future.result
    asked: list[str] = []
    gone = threading.Event()

    def late(future: Any, timeout: float | None = None) -> Any:
        asked.append(future.key)
        if future.key.endswith("-1") and asked.count(future.key) == 1:
            gone.wait(timeout)
            raise TimeoutError
        return result(future, timeout)

    monkeypatch.setattr(feed_tasks, "_FETCH", 0.1)
    monkeypatch.setattr(distributed.Future, "result", late)
    try:
        with lab.feed(lambda step: np.int32(step), s, steps=4, name="reached") as feed:
            assert [int(value.result()) for value in feed] == [0, 1, 2, 3]
        until(lambda: {r.args["step"] for r in tasks(lab) if r.program == "reached"} == {*range(4)})
        again = max(asked, key=asked.count)
        assert again.endswith("-1")
        assert asked.count(again) == 2
    finally:
        gone.set()
    s.release()


def test_an_element_that_could_not_be_asked_for_comes_with_the_next_call(
    lab: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a host is gone: before its task is submitted, and when Dask has it already."""
    s = lab.slice(1)

    def failing(method: Any, call: int) -> Any:
        calls = itertools.count()

        def instead(*args: Any) -> Any:
            if next(calls) == call:
                raise pw.PathwaysError(Failure("lost", "a host is gone"))
            return method(*args)

        return instead

    monkeypatch.setattr(HostTasks, "_parcel", failing(HostTasks._parcel, 3))
    monkeypatch.setattr(HostTasks, "_listen", failing(HostTasks._listen, 5))
    found: list[int] = []
    errors: list[pw.PathwaysError] = []
    with lab.feed(lambda step: np.int32(step), s, prefetch=2, steps=8) as feed:
        while len(found) < 8:
            try:
                taken = next(feed)
            except pw.PathwaysError as error:
                errors.append(error)  # with its traceback, which has the task's future
            else:
                found.append(int(taken.result(timeout=60.0)))
    assert found == [*range(8)]
    assert len(errors) == 2
    s.release()


def test_the_end_of_a_task_is_not_that_of_the_one_in_its_place() -> None:
    old, new = _Task(1, 4), _Task(1, 4)
    tasks: Any = SimpleNamespace(_lock=threading.Lock(), _tasks={(1, 4): new})
    HostTasks._ended(tasks, old, Failure("lost", "a host is gone"))
    assert tasks._tasks[1, 4] is new


def test_no_future_goes_while_dask_is_taken_leave_of(lab: pw.Lab) -> None:
    """Its message would find a link that the scheduler has closed, and Dask would log an error."""
    tasks, described = HostTasks(lab), Described()
    tasks.begin(tasks.new_number(), np.float32, "feed", described)
    until(lambda: described.done)
    client, seen = tasks._dask, []
    close = client.close

    def closes(**options: Any) -> None:
        seen.append((tasks._hearer.is_alive(), len(client.futures)))
        close(**options)
        seen.append((client.status, len(tasks._sources)))

    client.close = closes
    tasks.close()
    assert seen == [(False, 3), ("closed", 1)]
    assert not tasks._sources


def test_what_is_asked_of_a_feed_while_another_thread_ends_its_lab_says_so() -> None:
    tasks: Any = SimpleNamespace(_connection=Mock(), _sources={})
    with pytest.raises(pw.PathwaysError, match=r"(?s)element 4 will not be made.*a feed ends with"):
        HostTasks.submit(tasks, 1, 4, (), [])


def test_a_worker_that_dies_loses_nothing_and_repeats_nothing(lab: pw.Lab, tmp_path: Path) -> None:
    """Once while it makes an element, once when the hosts have one and nobody knows it yet."""
    s = lab.slice(2, "data")
    folder = str(tmp_path)

    def make(step: int) -> Any:
        def first(what: str) -> bool:
            path = f"{folder}/{what}"
            there = os.path.exists(path)
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
            return not there

        if step == 2 and first("making"):
            time.sleep(60)
        if step == 4 and first("sent"):
            # Called when all hosts have said that they have it.
            worker_tasks._worker = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        return np.full((2, 2), step, np.float32)

    add = pw.jit(lambda w, x: 10 * w + x.sum() / 4, on=s)
    with lab.feed(make, s.sharding(P("data")), prefetch=3, steps=7, name="batches") as feed:
        w = add(np.float32(0), next(feed))
        making = tmp_path / "making"
        until(lambda: making.exists() and making.read_text().endswith("\n"))
        os.kill(int(making.read_text()), signal.SIGKILL)
        for element in feed:
            w = add(w, element)
        assert float(w) == 123456  # all of them, once, in order
    until(
        lambda: sorted(r.args["step"] for r in tasks(lab) if r.program == "batches") == [*range(7)]
    )
    pids = (tmp_path / "sent").read_text().split()
    assert len(set(pids)) == 2, "the element was made again by another worker"
    s.release()


def test_a_worker_is_replaced_when_the_machine_has_room_for_it_again(
    lab: pw.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = lab.slice(1)
    popen, starts = subprocess.Popen, itertools.count()

    def refused(*args: Any, **options: Any) -> Any:
        if next(starts) < 2:
            raise OSError(errno.EAGAIN, "no process left")
        return popen(*args, **options)

    monkeypatch.setattr(feed_tasks, "_LOOK", 0.05)
    with lab.feed(lambda step: np.int32(os.getpid()), s, prefetch=0) as feed:
        pid = int(next(feed))
        monkeypatch.setattr(subprocess, "Popen", refused)
        os.kill(pid, signal.SIGKILL)
        assert int(next(feed).result(timeout=60.0)) != pid
    assert next(starts) >= 3
    s.release()


def test_a_cluster_of_ones_own_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if loopback were a network: elements go to hosts with the cluster's credentials."""
    monkeypatch.setattr(dask_private, "is_loopback", lambda address: False)
    security = distributed.Security.temporary()
    common = {"security": security, "host": "127.0.0.1"}
    worker = {**common, "nthreads": 1, "dashboard_address": None}
    with (
        distributed.SpecCluster(
            workers={
                "host": {"cls": distributed.Nanny, "options": worker},
                "feed": {"cls": distributed.Nanny, "options": {**worker, "resources": {FEEDS: 1}}},
            },
            scheduler={
                "cls": distributed.Scheduler,
                "options": {**common, "port": 0, "dashboard": False},
            },
            security=security,
        ) as cluster,
        pw.connect(cluster, devices_per_host=1, platform="cpu") as lab,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        assert lab._control.tls is not None
        hosts = [host for island in lab.islands for host in island.hosts]
        assert len(hosts) == 1  # the other worker launches nothing
        on = lab.slice(1)
        double = pw.jit(lambda x: 2 * x, on=on)
        with lab.feed(lambda step: np.float32([step, os.getpid()]), on, steps=4) as feed:
            found = [double(x).result().tolist() for x in feed]
        assert [x[0] for x in found] == [0, 2, 4, 6]
        assert found[0][1] / 2 not in {os.getpid(), 0}
