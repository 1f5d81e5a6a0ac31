"""What is compared, and what of a timeline is counted, without a cluster."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.code import jaxprs
from pathways_lab.core.errors import PathwaysError
from pathways_lab.notebook.reports.training_comparison import SideBySide, _difference
from pathways_lab.pipeline import measured, ways
from pathways_lab.pipeline.mpmd.marks import named
from pathways_lab.timeline.log import Timeline
from pathways_lab.timeline.records import Event, Sample, Span
from tests.client.kit import a_slice


def dense(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights)


def test_a_held_layer_is_the_layer_to_the_bit_and_holds_for_each_example() -> None:
    w = np.full((4, 4), 0.1, np.float32)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    slow = pw.pipeline.held(dense, 3, 8)

    def total(layer: Any) -> Any:
        return jax.value_and_grad(lambda w, x: layer(w, x).sum(), argnums=(0, 1))

    for got, wanted in zip(
        jax.tree.leaves(jax.jit(total(pw.pipeline.held(dense, 0)))(w, x)),
        jax.tree.leaves(jax.jit(total(dense))(w, x)),
        strict=True,
    ):
        assert np.array_equal(got, wanted)
    both = jax.make_jaxpr(total(slow))(w, x).jaxpr
    assert jaxprs.held_seconds(both) == pytest.approx(2 * (0.003 + 0.008), rel=1e-5)
    assert jaxprs.held_seconds(both, sharers=2) == pytest.approx(0.003 + 0.008, rel=1e-5)
    # Each half of the backward pass can be had alone, and each of the two layers has its own.
    one, two = named("one", dense), named("two", lambda w, x: slow(w, slow(w, x)))
    step = pw.mpmd.jit(
        jax.grad(lambda w, x: two(w, one(w, x)).sum()),
        on={"one": a_slice(1), "two": a_slice(1)},
        schedule="zero-bubble",
    )
    held = {
        node.fragment.kind: jaxprs.held_seconds(
            jax.make_jaxpr(node.function.function)(*(ref.type.struct for ref in node.inputs)).jaxpr
        )
        for node in step.partition(w, x).nodes
        if node.fragment.part == "two"
    }
    expected = {"forward": 2 * 0.006, "backward": 2 * 0.008, "weight": 2 * 0.008}
    assert held == pytest.approx(expected, rel=1e-5)


def test_ways_that_there_are_not_are_refused() -> None:
    ways.check(["spmd", "multi-controller", "pipeline-1f1b-islands-barrier"])
    ways.check([pw.pipeline.gpipe(2, 2), "pipeline-1f1b"])
    for wrong in ("gpipe", "pipeline-dream", "spmd-islands", "pipeline-gpipe-barrier-islands"):
        with pytest.raises(PathwaysError, match=f"no way called '{wrong}'"):
            ways.check(["spmd", wrong])
    for none in ("spmd", 3):
        with pytest.raises(PathwaysError, match=f"ways={none!r} is not a list of ways"):
            ways.check(none)  # type: ignore[arg-type]
    lab, work = Mock(islands=[]), Mock()
    with pytest.raises(PathwaysError, match="no island 'moon' to compare on"):
        ways.ready(lab, "spmd", work, "moon").__enter__()
    with pytest.raises(PathwaysError, match="'spmd' is there more than once"):
        ways.check(["spmd", "spmd"])


def test_what_is_measured_is_what_the_records_say() -> None:
    """Two devices of one slice: one computes for half of the time; both links have bytes."""
    on = a_slice(2, axes=("data",))
    time = [10.0]
    timeline = Timeline(clock=lambda: time[0])
    with timeline.recording() as recording:
        time[0] = 20.0

    def gang(start: float, end: float, device: int, island: str = "island0") -> Span:
        return Span("gang", start, end, island, f"{island}/host0", (device,), 1, 0, "p", "f")

    def message(source: str, target: str) -> Event:
        args = {"kind": "k", "source": source, "target": target, "bytes": 100}
        return Event("message", 12.0, args=args)

    def moved(source: str) -> Span:
        args = {"source": source, "nbytes": 7}
        return Span("transfer", 12.0, 13.0, "island0", "island0/host0", args=args)

    joined = Event("host-joined", 1.0, "island0", "island0/host1")
    used = Sample("memory", 13.0, 64.0, "island0", "island0/host0", {"device": 1, "most": 64})
    timeline.extend(
        [
            gang(8.0, 9.9, 0), gang(11.0, 15.0, 0), gang(11.0, 13.0, 1),
            gang(11.0, 19.0, 0, "island1"), message("client", "control"),
            message("control", "island0/host0"), moved("island0/host1"), moved("island1/host0"),
            used, joined,
        ]
    )  # fmt: skip
    m = measured.measure(
        recording, [on], steps=2, examples=8, bubble=None, cpu=0.0, loss=0.0, difference=0.0,
        note="",
    )  # fmt: skip
    assert (m.seconds, m.busy, m.throughput) == (4.0, 0.75, 4.0)
    assert m.messages == {measured.CLIENT: 1, measured.CONTROL: 1}
    assert m.bytes[measured.INSIDE] == m.bytes[measured.BETWEEN] == 7
    assert m.memory == 64


def test_differences_are_seen() -> None:
    a = [np.array([1.0, -4.0], np.float32), np.zeros(0, np.float32)]
    b = [np.array([1.0, -3.0], np.float32), np.zeros(0, np.float32)]
    assert _difference(a, a) == 0
    assert _difference(a, b) == 0.25
    assert np.isnan(_difference(a, [np.array([1.0, np.nan]), b[1]]))


def test_no_table_of_waits_where_devices_waited_for_nothing() -> None:
    def shown(idle: dict[str, float]) -> str:
        links = dict.fromkeys((measured.CLIENT, measured.CONTROL), 0)
        nbytes = dict.fromkeys((*links, measured.INSIDE, measured.BETWEEN), 0)
        of = measured.Measured(
            1.0, 1, 1, 1.0, None, idle, links, nbytes, 0.0, 0, 0.5, 0.0, "a Python loop"
        )
        found = SideBySide({"spmd": of}, {}, 1e-3, True)
        assert max(len(table[0]) for table in (found.rows(), found.wire())) < 10, "pages cut more"
        return repr(found)

    assert "dispatch" in shown({"dispatch": 0.25})
    assert "25.0%" in shown({"dispatch": 0.25})
    assert shown({}).count("way") == 2
