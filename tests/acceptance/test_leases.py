"""Leased islands on the real lab: for one client alone; hosts that run loops by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab.lab import Lab
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.timeline.records import Event, Span
from pathways_lab.transport.codec import unpack
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

SECONDS = 60.0
X = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=2, devices_per_host=1, progress=False) as started:
        yield started


@pytest.fixture
def other(lab: pw.Lab) -> Iterator[Lab]:
    """A second client of the same lab."""
    with Lab(lab._control, name="other") as joined:
        yield joined


def mean_step(on: pw.Slice) -> Any:
    """One all-reduce and one addition."""

    def body(v: jax.Array) -> Any:
        return jax.lax.psum(v, "x") * 0.5 + 1

    step = jax.shard_map(body, mesh=on.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return pw.jit(step, on=on, in_shardings=P("x"), out_shardings=P("x"), name="step")


def test_a_leased_island_is_one_clients_alone(lab: pw.Lab, other: Lab) -> None:
    theirs = other.slice(1, island="island0", wait=False)
    kept = pw.jit(lambda v: v + 1, on=theirs)(X)
    kept.block_until_ready()
    with pytest.raises(pw.PathwaysError, match=rf"{other.name} has slice s1 .*1 handle"):
        lab.lease("island0")
    theirs.release()
    other.slice(1, island="island1").release()  # an answer: what came before has arrived
    with pytest.raises(pw.PathwaysError, match=rf"{other.name} has slice s1 \(released"):
        lab.lease("island0")
    del kept

    def alone() -> bool:
        slices = lab.session.connection.topology["slices"]
        return all(unpack(SliceBinding, s).island != "island0" for s in slices)

    until(alone)
    with lab.lease("island0") as lease:
        assert lease.held
        with pytest.raises(pw.PathwaysError, match=f"is leased to {lab.name}"):
            other.slice(1, island="island0", wait=False)
        with pytest.raises(pw.PathwaysError, match=f"{lab.name} has a lease of it"):
            other.lease("island0")
        with pytest.raises(pw.PathwaysError, match="on lease already"):
            lab.lease("island0")
        assert other.slice(1).binding.island == "island1"
    assert not lease.held
    other.slice(1, island="island0").release()


def test_a_lease_ends_with_its_client(lab: pw.Lab) -> None:
    with Lab(lab._control, name="passing") as passing:
        passing.lease("island0")
        with pytest.raises(pw.PathwaysError, match="is leased to"):
            lab.slice(1, island="island0", wait=False)

    def free() -> bool:
        return any(isinstance(r, Event) and r.kind == "lease-ended" and r.client == passing.name
                   for r in lab.timeline.records)  # fmt: skip

    until(free)
    lab.slice(1, island="island0").release()


def test_an_unknown_island(lab: pw.Lab) -> None:
    with pytest.raises(pw.PathwaysError, match="no island 'island9' to lease; there is island0"):
        lab.lease("island9")


def test_multi_controller_computes_what_one_controller_computes(lab: pw.Lab) -> None:
    on = lab.slice(2, island="island0")
    assert len(on.hosts) == 2
    step = mean_step(on)
    y = X
    for _ in range(10):
        y = step(y)
    expected = y.result(timeout=SECONDS)
    with pytest.raises(pw.PathwaysError, match="needs island0 for itself"):
        lab.multi_controller(step, X, steps=10)
    with lab.lease("island0"):
        begun = lab.timeline.clock()
        for wait in (False, True):
            for records in (False, True):
                found = lab.multi_controller(step, X, steps=10, wait=wait, records=records)
                np.testing.assert_array_equal(found.result(timeout=SECONDS), expected)

        def spans() -> list[Span]:
            # Records of the runs before may still be on their way.
            found = (r for r in lab.timeline.records if isinstance(r, Span) and r.kind == "gang")
            return [r for r in found if r.start >= begun]

        # Per host: each of ten steps, twice, and two loops as a whole.
        until(lambda: len(spans()) == 2 * (10 + 10 + 1 + 1))
        assert {s.host for s in spans()} == set(on.hosts)
        assert {s.step for s in spans()} == set(range(10))
        assert all(s.devices == (0,) and s.node == "step" for s in spans())
        # In plain JAX, with a result that is not carried.
        again, loss = lab.multi_controller(
            lambda w, batch: (w + batch, (w * batch).sum()),
            X, np.ones(4, np.float32), on=on, steps=3, in_shardings=(P("x"), P("x")),
            out_shardings=(P("x"), P()),
        )  # fmt: skip
        np.testing.assert_array_equal(again.result(timeout=SECONDS), X + 3)
        assert loss.result(timeout=SECONDS) == (X + 2).sum()
        with pytest.raises(pw.PathwaysError, match="cannot be repeated"):
            lab.multi_controller(lambda v: v.sum(), X, on=on, steps=2)
        with pytest.raises(pw.PathwaysError, match="the argument that it becomes"):
            lab.multi_controller(
                lambda v: v + 1, X, on=on, steps=2, in_shardings=P("x"), out_shardings=P()
            )
    on.release()


def test_the_control_plane_itself_refuses_loops_without_a_lease(lab: pw.Lab) -> None:
    """A client that only believes to have one."""
    on = lab.slice(2, island="island1")
    lease = lab.lease("island1")
    lab.session.connection.questions.ask("return-lease", {"island": "island1"})
    with pytest.raises(pw.PathwaysError, match="unannounced functions"):
        lab.multi_controller(mean_step(on), X, steps=2).result(timeout=SECONDS)
    assert lease.held
    del lab.leases["island1"]
    on.release()
