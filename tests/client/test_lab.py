"""The lab: started, joined, shared, lost and closed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import pathways_lab as pw
from pathways_lab.client import cluster, requests
from pathways_lab.client import lab as labs
from pathways_lab.runtime.switching import Sooner

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


def test_the_cluster_as_text_and_table() -> None:
    islands = cluster.islands_of(TOPOLOGY)
    assert [island.devices for island in islands] == [4]
    assert [d.number for d in cluster.devices_of(islands)] == [0, 1, 2, 3]
    assert "4 x cpu (emulated), 1,024 MiB each, process 5" in cluster.as_text(islands)
    assert "<td>island0/host0</td>" in cluster.as_html(islands)
    assert cluster.as_text(()) == "no hosts"


SIZES = [("512 MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("7", 7), (9, 9)]


@pytest.mark.parametrize(("given", "size"), SIZES)
def test_sizes(given: int | str, size: int) -> None:
    assert requests.bytes_of(given) == size


@pytest.mark.parametrize("given", ["much", "5 XB", "", None])
def test_what_is_no_size(given: Any) -> None:
    with pytest.raises(pw.PathwaysError, match="is no size"):
        requests.bytes_of(given)


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
        requests.slice_request(shape, axes)
    assert caught.value.failure.remedy


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
    wanted = Sooner._wanted
    with pytest.raises(pw.PathwaysError, match="does not answer"):
        pw.connect(stale)
    assert Sooner._wanted == wanted


# --- on real processes --------------------------------------------------------------------------


@pytest.mark.cluster
def test_the_life_of_a_lab(tmp_path: Path) -> None:
    """Started at first use, shared by a file, lost to nobody, gone without trace."""
    told = []
    first = pw.start(1, 1, 2, platform="cpu", progress=told.append)
    wanted = Sooner._wanted
    assert wanted, "links are read though the kernel computes"
    assert told[-1].done == told[-1].total
    assert pw.current() is first
    assert pw.make_virtual_device_set().add_slice(tpu_devices=1).owner is first
    assert "1 islands, 2 devices" in repr(first)
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
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for use in (handle.result, first.accounts, lambda: first.slice(1)):
        with pytest.raises(pw.PathwaysError, match=r"another lab was started with pw.start\(\)"):
            use()
    assert on.owner is None
    second.close()
    second.close()
    assert Sooner._wanted == wanted - 1
    assert repr(second) == "<Lab, closed>"


@pytest.mark.cluster
def test_a_start_that_is_refused_ends_nothing() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"islands": 0}, "islands is 0"),
        ({"transport": "pigeons"}, "transport is 'pigeons'"),
        ({"platform": "abacus"}, "platform is 'abacus'"),
        ({"memory": "1000000 GiB"}, "are free"),
        ({"memory": "much"}, "is no size"),
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
    lab.feed(lambda step: np.ones(1), lab.slice(1), steps=0)  # from now on there is a Dask client
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
                (handle + 1).result(timeout=10)

        with pytest.raises(pw.PathwaysError, match="the lab is gone"):
            work()
        assert lab.closed
        assert "gone" in repr(lab)
        with pytest.raises(pw.PathwaysError, match="the lab is gone"):
            lab.slice(1)
