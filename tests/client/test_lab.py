"""The lab: started, joined, shared, lost and closed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

import pathways_lab as pw
from pathways_lab.client.chaos.chaos import Chaos
from pathways_lab.client.feeds.feed import Feeding
from pathways_lab.client.lab import lab as labs
from pathways_lab.client.lab import opening, slice_request, topology_view
from pathways_lab.client.lab.dcn import Dcn
from pathways_lab.client.lab.diagnostics import Care
from pathways_lab.client.lab.sharing import Sharing
from pathways_lab.client.lab.topology_view import Host, Island
from pathways_lab.notebook.reports import stall_figure
from pathways_lab.runtime.cluster.lab_spec import Wishes
from pathways_lab.runtime.processes.interpreter_settings import Settings
from tests.client.kit import KEY, FakeLab, a_slice
from tests.runtime.processes import until

TOPOLOGY = {
    "islands": [
        {
            "name": "island0",
            "hosts": [
                {
                    "name": "island0/host0", "pid": 5, "worker_pid": 4, "devices": 4, "kind": "cpu",
                    "memory": 1 << 30, "data_address": "unix:/x", "emulated": True,
                }
            ],
        }
    ]
}  # fmt: skip


# --- pure ----------------------------------------------------------------------------------


def test_ctrl_c_while_a_lab_closes_counts_when_it_has_closed() -> None:
    ended: list[str] = []

    def end(reason: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        ended.append(reason)

    with pytest.raises(KeyboardInterrupt):
        pw.Lab.close(Mock(_end=end))
    assert ended == ["the lab was closed"]


def test_the_cluster_as_a_table() -> None:
    islands = topology_view.islands_of(TOPOLOGY)
    assert [island.devices for island in islands] == [4]
    assert [d.number for d in topology_view.devices_of(islands)] == [0, 1, 2, 3]
    page = topology_view.table_of(islands)._repr_html_()
    for cell in ("island0/host0", "4 x CPU (emulated)", "1,024 MiB", "5"):
        assert f">{cell}</td>" in page


def test_a_host_of_another_machine_shows_its_machine_and_address() -> None:
    alike = {"Python": "3.12", "pathways_lab": "0.9", "JAX": "0.10"}
    host = Host("west/one", 1, 1, 2, "cpu", 1 << 30, "tcp://10.0.0.2:3941", False, "", "one", alike)
    assert host.where == "one (10.0.0.2)"
    assert dataclasses.replace(host, data_address="unix:/x").where == "one"
    (row,) = repr(topology_view.IslandTable([Island("west", (host,))])).splitlines()[1:]
    assert "one (10.0.0.2)" in row
    assert row.endswith("Python 3.12, pathways_lab 0.9, JAX 0.10")
    assert "Python" not in repr(topology_view.table_of([Island("west", (host,))]))


def words(**given: Any) -> Callable[[], object]:
    """A request for a slice of two devices, but for what is given."""
    return lambda: slice_request.slice_request(**{"shape": 2, **given})


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (words(memory=-1), r"memory=-1 is not a size: sizes are bytes, from 0 on"),
        (words(memory="-1 GB"), r"memory='-1 GB' is not a size"),
        (words(memory=float("inf")), "memory=inf is not a size"),
        (words(memory=True), "memory=True is not a size"),
        (words(memory=10**30), "is not a size"),
        (words(shape=True), r"a slice of shape \(True,\) cannot be"),
        (words(shape=(2, 2.0)), r"a slice of shape \(2, 2.0\) cannot be"),
        (words(axes=3), r"axes \(3,\) do not fit shape \(2,\)"),
        (words(shape=(2, 2), axes=(1, 2)), r"axes \(1, 2\) do not fit shape \(2, 2\)"),
        (words(axes=("",)), r"axes \(''\,\) do not fit"),
        (words(axes=("größe",)), "'größe' cannot be the name of a mesh axis: XLA ends"),
        (lambda: pw.pmap(abs, "größe", devices=a_slice(2)), "'größe' cannot be the name"),
        (words(island=0), "island=0 is not a name"),
        (words(kind=0), "kind=0 is not a name"),
        (lambda: slice_request.seconds("wait", -1), "wait=-1 is not a number of seconds"),
        (
            lambda: slice_request.seconds("wait", float("nan")),
            "wait=nan is not a number of seconds",
        ),
        (lambda: slice_request.seconds("patience", "x"), "patience='x' is not a number of seconds"),
        (words(shape=10**30), r"of shape \(10{30},\) cannot be: .* from 1 to 2147483647"),
        (lambda: slice_request.count("parts", 2.5), r"parts=2\.5 is not a whole number from 1 to"),
        (lambda: slice_request.count("parts", 0), "parts=0 is not a whole number"),
        (lambda: slice_request.count("parts", 10**30), "parts=10+ is not a whole number"),
        (lambda: slice_request.count("parts", True), "parts=True is not a whole number"),
        (
            lambda: slice_request.duration("seconds", 0),
            "seconds=0 is not a duration: it is more than 0",
        ),
        (lambda: slice_request.duration("seconds", 1e9), "is not a duration: .* at most 86400"),
        (lambda: slice_request.duration("seconds", None), "seconds=None is not a duration"),
        (lambda: Dcn.of(float("inf"), 0), "latency=inf of the DCN is not a number"),
        (lambda: pw.make_virtual_device_set(3), "lab=3 has no devices to make a set of"),  # type: ignore[arg-type]
        (lambda: pw.pmap(abs, devices=3), r"devices=\[3\] are not the virtual devices"),
        (lambda: pw.pmap(abs, devices=a_slice(2), in_axes="x"), "in_axes='x' of pmap of 'abs'"),
        (
            lambda: pw.pmap(abs, devices=a_slice(2), out_axes=-1),
            "out_axes=-1 .*: -1 is not a whole",
        ),
        (lambda: pw.jit(abs, in_shardings=3), "an entry of in_shardings is 3; a slice takes"),
        (lambda: pw.jit(abs, out_shardings={"a": "x"}), "an entry of out_shardings is 'x'"),
        (lambda: slice_request.path("path", None), "path=None is not a path"),
        (lambda: slice_request.function("make", 3), "make=3 is not a function"),
        (lambda: pw.save(3, 1), "folder=3 is not a path"),  # type: ignore[arg-type]
        (lambda: pw.restore(3), "folder=3 is not a path"),  # type: ignore[arg-type]
        (lambda: Wishes(transcript=3).check(), "transcript is 3"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_asked_for_is_called_as_the_user_wrote_it(
    asked: Callable[[], object], says: str
) -> None:
    with pytest.raises(pw.PathwaysError, match=says):
        asked()


def chaos() -> Any:
    """Of a lab that is told nothing."""
    hosts = [SimpleNamespace(name=f"island{n}/host0", pid=1) for n in range(2)]
    islands = [SimpleNamespace(name=f"island{n}", hosts=[h]) for n, h in enumerate(hosts)]
    return Chaos(Mock(islands=islands, dask_client=Mock(side_effect=AssertionError)), Mock())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda c: c.hang("island0/host0", seconds=1e30), "seconds=1e.30 is not a duration"),
        (lambda c: c.slow("island0/host0", seconds=-1), "seconds=-1 is not a duration"),
        (lambda c: c.slow("island0/host0", factor="x"), "factor='x' makes nothing slower"),
        (lambda c: c.delay("island0", "island1", seconds=0), "seconds=0 is not a duration"),
        (lambda c: c.delay("island0", "island1", ms=-1), "ms=-1 is not a duration"),
        (lambda c: c.delay(None, "island1"), "the lab has no host or island None"),
        (lambda c: c.partition("island0", None), "the lab has no host or island None"),
        (lambda c: c.drop("island0", "island1", count=0), "count=0 is not a whole number"),
        (lambda c: c.duplicate("island0", "island1", seconds=-1), "seconds=-1 is not a duration"),
    ],
)
def test_no_host_hears_of_a_fault_that_cannot_be(fault: Callable[[Any], Any], says: str) -> None:
    """A device process that is told of one ends itself."""
    with pytest.raises(pw.PathwaysError, match=says):
        fault(chaos())


def test_a_lab_is_not_told_what_cannot_be(fake: FakeLab) -> None:
    """With the argument's name, and what would be one; the lab says it of messages only."""
    lab: Any = SimpleNamespace(session=fake.session)
    for asked, says in (
        (lambda: Care.stuck(lab, None), "seconds=None is not a number of seconds"),  # type: ignore[arg-type]
        (lambda: Sharing.quota(lab, "b", devices=10**30), "devices=10+ is not a whole number"),
        (lambda: Feeding.feed(lab, abs, None, prefetch=2.5), r"prefetch=2\.5 is not a whole"),  # type: ignore[arg-type]
        (lambda: Feeding.feed(lab, abs, None, steps=-1), "steps=-1 is not a whole number from 0"),
        (
            lambda: fake.connection.board.wait(bool, float("nan"), "it"),
            "timeout=nan is not a number",
        ),
    ):
        with pytest.raises(pw.PathwaysError, match=says):
            asked()


def test_that_nobody_is_stuck_is_said() -> None:
    questions = Mock(ask=lambda op, fields: Mock(fields={"story": None}))
    lab: Any = SimpleNamespace(session=Mock(connection=Mock(questions=questions)))
    answer = Care.stuck(lab)
    assert not answer
    assert repr(answer) == "nobody is stuck: nothing is late, and all hosts answer"
    assert stall_figure.as_html(answer) == repr(answer)


def test_a_question_starts_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock()
    monkeypatch.setattr(labs, "_labs", [])
    monkeypatch.setattr(labs, "_gone", None)
    monkeypatch.setattr(opening, "start", started)
    with pytest.raises(pw.PathwaysError, match="this kernel has no lab") as caught:
        pw.current()
    assert "pw.start()" in caught.value.failure.remedy
    started.assert_not_called()
    assert pw.make_virtual_device_set()
    started.assert_called_once_with()


def test_an_island_is_named_and_not_given() -> None:
    (island,) = topology_view.islands_of(TOPOLOGY)
    with pytest.raises(pw.PathwaysError, match="write text, for example 'island0'"):
        slice_request.slice_request(2, island=island)  # type: ignore[arg-type]


def test_sizes_of_a_mesh_may_be_any_librarys_whole_numbers() -> None:
    asked = slice_request.slice_request((np.int64(2), np.uint8(3)))  # type: ignore[arg-type]
    assert asked.shape == (2, 3)
    assert {type(size) for size in asked.shape} == {int}
    wishes = Wishes(np.int64(1), np.uint8(2), np.int32(3))  # type: ignore[arg-type]
    wishes.check()
    given = (wishes.islands, wishes.hosts_per_island, wishes.devices_per_host)
    assert given == (1, 2, 3)
    assert {type(count) for count in given} == {int}
    for seconds in (np.int64(2), np.float32(2)):
        assert (
            slice_request.patience("wait", seconds) == slice_request.duration("for", seconds) == 2.0
        )


SIZES = [("512 MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("7", 7), (9, 9)]


@pytest.mark.parametrize(("given", "size"), SIZES)
def test_sizes(given: int | str, size: int) -> None:
    assert slice_request.bytes_of(given) == size


@pytest.mark.parametrize("given", ["much", "5 XB", "", None, "nan", True])
def test_what_is_no_size(given: Any) -> None:
    with pytest.raises(pw.PathwaysError, match="is not a size"):
        slice_request.bytes_of(given)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), ()),
        ((2, 0), ("x", "y")),
        ((1, 1, 1, 1), tuple("abcd")),
        ((2, 2), ("x", "x")),
        ((2,), ()),
        (2.0, None),
        ((2, 1.5), None),
    ],
)
def test_shapes_that_cannot_be(shape: Any, axes: Any) -> None:
    with pytest.raises(pw.PathwaysError) as caught:
        slice_request.slice_request(shape, axes)
    assert caught.value.failure.remedy


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "a!"}, "cannot be a client's name"),
        ({"hosts_per_island": 0}, "hosts_per_island is 0"),
        ({"devices_per_host": "x"}, "devices_per_host is 'x'"),
        ({"memory": -5}, "memory=-5 is not a size"),
        ({"timeout": "x"}, "timeout is 'x'"),
    ],
)
def test_what_is_wrong_with_a_connection_is_said_before_anybody_is_asked(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(pw.PathwaysError, match=says):
        pw.connect("tcp://127.0.0.1:1", **given)


def test_nothing_to_connect_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PATHWAYS_LAB", raising=False)
    with pytest.raises(pw.PathwaysError, match="PATHWAYS_LAB is not set"):
        pw.connect()
    with pytest.raises(pw.PathwaysError, match=f"there is no lab file '{tmp_path}/none'"):
        pw.connect(tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pw.PathwaysError, match=f"there is no lab file '{tmp_path}/none'"):
        pw.connect("none")
    with pytest.raises(pw.PathwaysError, match="cannot connect to int"):
        pw.connect(7)
    stale = tmp_path / "stale"
    labs.attach.write_lab_file(stale, labs.ControlAddress(f"unix:{tmp_path}/gone", b"k" * 32))
    wanted = Settings.wanted
    with pytest.raises(pw.PathwaysError, match="does not answer"):
        pw.connect(stale)
    assert Settings.wanted == wanted


def test_the_lab_of_the_kernel_is_the_last_one_that_is_open(tmp_path: Path) -> None:
    with FakeLab() as one, FakeLab() as other:
        for number, fake in enumerate((one, other)):
            labs.attach.write_lab_file(
                tmp_path / str(number), labs.ControlAddress(fake.address, KEY)
            )
        first, second = (pw.connect(tmp_path / name) for name in "01")
        assert pw.current() is second
        second.close()
        assert pw.current() is first
        third = pw.connect(tmp_path / "1")
        first.close()
        assert pw.current() is third
        third.close()
        with pytest.raises(pw.PathwaysError, match="the lab was closed"):
            pw.current()


def test_threads_may_give_slices_back_at_once(fake: FakeLab) -> None:
    class Looked(Mock):
        @property
        def id(self) -> int:
            for number in others:
                lab.release_slice(number)  # as another thread may, just then
            return 7

    with pw.Lab(labs.ControlAddress(fake.address, KEY)) as lab:
        lab.slices += [Mock(id=6), Looked(), kept := Mock(id=8)]
        others = iter([6])
        lab.release_slice(7)
        assert lab.slices == [kept]
    # The control plane has bound none of them, and says so of both.
    until(lambda: len(fake.edge.wrong) == 2)
    fake.edge.wrong.clear()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_slices_of_two_labs_stay_apart_in_copies(
    fake: FakeLab, copied: Callable[[Any], Any]
) -> None:
    """Each lab numbers its own from the beginning."""
    with FakeLab() as other:
        here, there = fake.slice(2), other.slice(2)
        assert here.id == there.id
        for on in (here, there):
            assert copied(on) is on
            assert copied(on.mesh) == on.mesh
            assert copied(on.devices) == on.devices


def test_a_lab_with_another_key_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    with FakeLab() as lab:
        labs.attach.write_lab_file(tmp_path / "f", labs.ControlAddress(lab.address, b"?" * 32))
        with pytest.raises(pw.PathwaysError, match="does not hold the key") as caught:
            pw.connect(tmp_path / "f")
    assert "new lab file" in caught.value.failure.remedy


class Late(FakeLab):
    """Has no host at first.  joins: until somebody watches."""

    joins = False

    def _topology(self, hosts: int) -> dict[str, Any]:
        return {**super()._topology(hosts), "islands": []}

    def _on_watch(self, fields: dict[str, Any], _: Any) -> None:
        if self.joins:
            self.say("topology", super()._topology(1))


def test_who_joins_a_lab_waits_for_its_first_host(tmp_path: Path) -> None:
    file = tmp_path / "lab.json"
    with Late() as late:
        labs.attach.write_lab_file(file, labs.ControlAddress(late.address, KEY))
        before = list(labs._labs)
        with pytest.raises(pw.PathwaysError, match=r"no host has joined the lab within 0\.01 s"):
            pw.connect(file, timeout=0.01)
        assert labs._labs == before
        late.joins = True
        with pw.connect(file) as lab:
            assert lab.islands
            assert pw.current() is lab


def test_a_lab_ends_whatever_its_front_end_does(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(lab: pw.Lab) -> None:
        raise AttributeError("a view")

    embedded = Mock(folder=None)
    lab = pw.Lab(labs.ControlAddress(fake.address, KEY), embedded)
    monkeypatch.setattr(labs.hooks, "lab_closes", broken)
    with pytest.raises(AttributeError, match="a view"):
        lab.close()
    assert lab.session.connection.closed is not None
    embedded.close.assert_called_once()


def test_a_lab_closes_while_its_views_are_being_imported(
    fake: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the cell after the one that loads the extension, whose thread imports them."""
    monkeypatch.setitem(sys.modules, "pathways_lab.notebook.view.view", ModuleType("half"))
    monkeypatch.setattr(labs.hooks, "lab_closes", pw._close_views)
    with pw.Lab(labs.ControlAddress(fake.address, KEY)) as lab:
        pass
    assert lab.closed


# --- on real processes --------------------------------------------------------------------------


@pytest.mark.cluster
def test_the_life_of_a_lab(tmp_path: Path) -> None:
    """Started at first use, shared by a file, lost to nobody, gone without trace."""
    told = []
    first = pw.start(1, 1, 2, platform="cpu", progress=told.append)
    wanted = Settings.wanted
    assert wanted, "links are read though the kernel computes"
    assert told[-1].done == told[-1].total
    assert pw.current() is first
    assert pw.make_virtual_device_set().add_slice(tpu_devices=1).owner is first
    assert "1 island, 2 devices" in repr(first)
    assert "island0/host0" in first._repr_html_()
    on = first.slice((1, 2), axes=("a", "b"))
    assert on.mesh.shape == {"a": 1, "b": 2}
    assert "a=1, b=2" in repr(on)
    handle = pw.device_put(np.ones(4), on)
    assert float((handle * 3).sum()) == 12

    # A second client, in another process, with nothing but the file.
    invitation = tmp_path / "lab.json"
    first.invite(invitation)
    assert invitation.stat().st_mode & 0o077 == 0
    code = """if True:
        import os, numpy as np, pathways_lab as pw
        lab = pw.connect()
        s = lab.slice(2)
        print(lab.name, float(pw.jit(lambda x: x.sum(), on=s)(np.ones(8))))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False,
        env={**__import__("os").environ, "PATHWAYS_LAB": str(invitation)},
    )  # fmt: skip
    assert done.stdout.split() == ["kernel-2", "8.0"], done.stderr
    assert float(handle.sum()) == 4

    # Starting another one ends it; its handles say why.
    assert first.embedded is not None
    processes = [psutil.Process(pid) for pids in first.embedded.pids.values() for pid in pids]
    second = pw.start(1, 1, 1, platform="cpu", progress=False)
    assert first.closed
    assert pw.current() is second
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for use in (handle.result, first.accounts, lambda: first.slice(1)):
        with pytest.raises(pw.PathwaysError, match=r"another lab was started with pw.start\(\)"):
            use()
    assert on.owner is None
    second.close()
    second.close()
    assert Settings.wanted == wanted - 1
    assert repr(second) == "<Lab, closed>"


@pytest.mark.cluster
def test_a_start_that_is_refused_ends_nothing() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"islands": 0}, "islands is 0"),
        ({"transport": "pigeons"}, "transport is 'pigeons'"),
        ({"platform": "abacus"}, "platform is 'abacus'"),
        ({"memory": "1000000 GiB"}, "are free"),
        ({"memory": "much"}, "is not a size"),
        ({"memory": -5}, "memory=-5 is not a size"),
        ({"idle_close": "soon"}, "idle_close is 'soon'"),
        ({"transcript": "/no/such/folder/t"}, "no such folder"),
        ({"name": "?"}, "cannot be a client's name"),
    ]
    with pw.start(1, 1, 1, platform="cpu", progress=False) as lab:
        for arguments, why in wrong:
            with pytest.raises(pw.PathwaysError, match=why) as caught:
                pw.start(**arguments)
            assert caught.value.failure.remedy
            assert lab.accounts(), arguments


@pytest.mark.cluster
def test_whatever_is_asked_of_a_closed_lab_says_that_it_is_gone(tmp_path: Path) -> None:
    lab = pw.start(1, 1, 1, platform="cpu", progress=False)
    chaos, islands = lab.chaos, lab.islands
    batches = lab.feed(lambda step: np.ones(1), lab.slice(1))
    next(batches).result()  # from now on there is a Dask client
    assert lab.view()
    s = lab.slice(1)
    double = pw.jit(lambda x: x * 2, on=s)
    step = pw.program(lambda x: double(x) + 1)
    h = step(np.ones(2))
    lab.close()
    asked: list[Callable[[], Any]] = [
        lab.accounts,
        lab.add_island,
        lab.dask_client,
        lab.dashboard,
        lab.stuck,
        lambda: chaos.kill("island0/host0"),
        lambda: lab.dashboard_link,
        lambda: lab.dcn(latency=0.1),
        lambda: lab.feed(lambda step: np.ones(1), None),
        lambda: next(batches),
        lambda: lab.invite(tmp_path / "lab.json"),
        lambda: lab.remove_island("island0"),
        lambda: lab.slice(1),
        lambda: double(np.ones(2)),
        lambda: step(np.ones(2)),
        lambda: double(h),
        lambda: h[0],
        lambda: pw.device_put(np.ones(2), s),
        s.rebind,
    ]
    for ask in asked:
        with pytest.raises(pw.PathwaysError, match="the lab is gone: the lab was closed"):
            ask()
    with pytest.raises(pw.PathwaysError, match="the lab is gone: the lab was closed"):
        pw.current()  # not a new one: it would have other slices
    assert not list(tmp_path.iterdir())
    assert lab.islands == islands
    for view in (lab.view(), lab.timeline.view()):
        assert view.outcome == "ended"


@pytest.mark.cluster
def test_a_lost_control_plane_is_told() -> None:
    with pw.start(1, 1, 1, platform="cpu", progress=False) as lab:
        handle = pw.device_put(np.ones(4), lab.slice(1)).block_until_ready()
        assert lab.embedded is not None
        psutil.Process(lab.embedded.pids["control"][0]).kill()

        def work() -> None:
            for _ in range(1000):
                (handle + 1).result(timeout=60)

        with pytest.raises(pw.PathwaysError, match="the lab is gone"):
            work()
        assert lab.closed
        assert "gone" in repr(lab)
        with pytest.raises(pw.PathwaysError, match="the lab is gone"):
            lab.slice(1)
