"""A handle goes from one client to another by a name, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.timeline.records import Event
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

W = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def other(lab: pw.Lab) -> Iterator[pw.Lab]:
    """A second client on the lab."""
    assert lab.embedded is not None
    with pw.Lab(lab.embedded.control, name="bob") as made:
        yield made


def events(lab: pw.Lab) -> list[Event]:
    return [r for r in lab.timeline.records if isinstance(r, Event)]


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def test_published_taken_computed_with_and_kept(lab: pw.Lab, other: pw.Lab) -> None:
    place = lab.slice((2, 2), ("x", "y"), island="island0")
    made = pw.jit(double, on=place, out_shardings=jax.P("x", "y"))(W)
    lab.publish("w", made)
    until(lambda: other.published == {"w": lab.name})
    taken = other.take("w")
    assert np.array_equal(taken.result(timeout=60), 2 * W)
    assert (taken.shape, taken.dtype, taken.slice.hosts) == (made.shape, made.dtype, place.hosts)
    # It goes into the taker's own programs, and moves to his own devices.
    for island in ("island0", "island1"):
        mine = pw.jit(double, on=other.slice((4,), ("d",), island=island))
        assert np.array_equal(mine(taken).result(timeout=60), 4 * W)
    with pytest.raises(pw.PathwaysError, match="another client's slice"):
        taken + 1
    # It is published on, in a tree, and comes back to whom it came from.
    other.publish("tree", {"w": taken, "more": (taken + mine(W),)})
    tree = lab.take("tree", wait=60)
    assert np.array_equal(tree["w"].result(timeout=60), 2 * W)
    assert np.array_equal(tree["more"][0].result(timeout=60), 4 * W)
    other.unpublish("tree")
    del tree
    until(lambda: {lab.name, "bob"} <= lab.accounts().clients.keys())
    until(lambda: lab.accounts().clients["bob"].dcn_bytes >= W.nbytes)
    # Neither the name, nor the owner's handle, nor his slice is needed any more.
    lab.unpublish("w")
    assert not lab.published
    del made
    place.release()
    again = other.session.data.fetch(taken.buffer, taken.type, taken.slice, taken.layout)
    until(lambda: again.done)
    assert again.failure is None
    assert np.array_equal(mine(taken).result(timeout=60), 4 * W)
    with pytest.raises(pw.PathwaysError, match="nothing is published under this name"):
        other.take("w")


def test_the_taker_keeps_it_when_the_publisher_leaves(lab: pw.Lab) -> None:
    assert lab.embedded is not None
    with pw.Lab(lab.embedded.control, name="ann") as ann:
        ann.publish("v", pw.jit(double, on=ann.slice(2))(W).block_until_ready())
        taken = lab.take("v")
    until(lambda: "ann" not in lab.clients)
    assert np.array_equal(taken.result(timeout=60), 2 * W)
    assert not lab.published


def test_without_a_ticket_nobody_reads(lab: pw.Lab, other: pw.Lab) -> None:
    """A client that knows the number, and has taken something else."""
    secret = pw.jit(double, on=lab.slice(2, island="island0"))(W)
    shared = pw.jit(double, on=lab.slice(2, island="island0"))(-W)
    lab.publish("shared", shared)
    taken = other.take("shared")
    buffer = other.session.connection.new_buffer()
    buffer.stored, buffer.ticket = secret.buffer_id, taken.buffer.ticket
    fetch = other.session.data.fetch(buffer, secret.type, secret.slice, secret.layout)
    until(lambda: fetch.done)
    assert fetch.failure is not None
    assert not fetch.parts
    until(lambda: any(e.kind == "rejected" and e.client == "bob" for e in events(lab)))
    # Only the link of the one who lied was closed, and he may come again.
    assert np.array_equal(secret.result(timeout=60), 2 * W)
    assert np.array_equal(taken.result(timeout=60), -2 * W)
