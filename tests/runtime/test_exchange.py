"""The exchange alone: what it shares, what it assembles, what it forgets."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.executor.launcher import Launcher
from pathways_lab.runtime import arrays
from pathways_lab.runtime.data_messages import Part, Parts
from pathways_lab.runtime.host.migration import Parking
from pathways_lab.runtime.host.transfer_engine import SMALL, Exchange
from pathways_lab.transport.codec import pack_fields, unpack_fields
from tests.runtime.exchange_kit import FAR, NEAR, Bench, Case, Wire, gathered
from tests.runtime.host_kit import binding, layout


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def benches(wire: Wire) -> Iterator[dict[str, Bench]]:
    made = {host: Bench(host, wire) for host in (NEAR, FAR)}
    yield made
    for bench in made.values():
        bench.exchange.close()


def hand_over(exchange: Exchange, fields: dict[str, Any], buffers: Sequence[Any]) -> None:
    message = unpack_fields(Parts, fields)
    exchange.submit(exchange.parts, message, message.pairs([memoryview(b) for b in buffers]))


def deliver(benches: dict[str, Bench], wire: Wire) -> None:
    letters, wire.letters = wire.letters, []
    for host, fields, buffers in letters:
        hand_over(benches[host].exchange, fields, buffers)
    for bench in benches.values():
        bench.settle()


def pointers(array: jax.Array) -> list[int]:
    return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]


def test_whole_shards_of_one_host_are_shared_not_copied(benches: dict[str, Bench]) -> None:
    near, beside = binding(1, (2,), [0, 1], NEAR), binding(2, (2,), [2, 3], NEAR)
    case = Case(
        benches, (64, 32), (near, layout(near, "a", None)), (beside, layout(beside, "a", None))
    )
    case.receive()
    case.send()
    (arrived,) = benches[NEAR].arrived
    assert arrived.payload is not None
    assert pointers(arrived.payload) == pointers(case.array)
    assert arrived.nbytes == 0


def test_a_host_assembles_its_own_shards_and_nothing_larger(
    benches: dict[str, Bench], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole array is never in one piece, on neither side, nor on the wire."""
    taken: list[int] = []
    take = arrays.Memory.take

    def noted(self: arrays.Memory, shape: Any, dtype: Any) -> Any:
        taken.append(int(np.prod(shape)) * dtype.itemsize)
        return take(self, shape, dtype)

    monkeypatch.setattr(arrays.Memory, "take", noted)
    near, far = binding(1, (4,), range(4), NEAR), binding(2, (4,), range(4), FAR)
    case = Case(benches, (64, 32), (near, layout(near, "a", None)), (far, layout(far, None, "a")))
    case.receive()
    case.send()
    whole = case.data.nbytes
    ((_, _, parts),) = wire.letters
    assert [len(part) for part in parts] == [whole // 16] * 16
    deliver(benches, wire)
    assert taken == [whole // 4] * 4
    (arrived,) = benches[FAR].arrived
    assert np.array_equal(np.asarray(arrived.payload), case.data)
    assert arrived.nbytes == whole


def test_replicas_of_a_host_share_what_came_once(benches: dict[str, Bench], wire: Wire) -> None:
    near, far = binding(1, (1,), [0], NEAR), binding(2, (4,), range(4), FAR)
    case = Case(
        benches, (1024, 128), (near, layout(near, None, None)), (far, layout(far, None, None))
    )
    case.receive()
    case.send()
    assert len(wire.letters) == 1
    # What arrives over a link of this size lies in pages of its own.
    host, fields, (data,) = wire.letters.pop()
    memory = arrays.Memory().take((len(data),), np.dtype(np.uint8))
    memory[:] = np.frombuffer(data, np.uint8)
    hand_over(benches[host].exchange, fields, [memory.data])
    benches[host].settle()
    (arrived,) = benches[FAR].arrived
    assert arrived.payload is not None
    assert set(pointers(arrived.payload)) == {memory.ctypes.data}
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert np.array_equal(np.asarray(add(arrived.payload)), case.data + 1)
    assert np.array_equal(memory.view(np.float32).reshape(case.data.shape), case.data)


@pytest.mark.parametrize(("columns", "messages"), [(8, 1), (SMALL // 4 - 1, 4), (SMALL // 16, 2)])
def test_small_parts_for_a_host_travel_together(
    benches: dict[str, Bench], wire: Wire, columns: int, messages: int
) -> None:
    near, far = binding(1, (4,), range(4), NEAR), binding(2, (4,), range(4), FAR)
    case = Case(
        benches, (4, columns), (near, layout(near, "a", None)), (far, layout(far, "a", None))
    )
    case.receive()
    case.send()
    assert len(wire.letters) == messages
    deliver(benches, wire)
    (arrived,) = benches[FAR].arrived
    assert np.array_equal(np.asarray(arrived.payload), case.data)
    assert arrived.nbytes == case.data.nbytes


def test_assembled_memory_is_used_again(benches: dict[str, Bench], wire: Wire) -> None:
    near, far = binding(1, (2,), [0, 1], NEAR), binding(2, (1,), [0], FAR)
    for turn in range(3):
        case = Case(
            benches, (512, 128), (near, layout(near, "a", None)), (far, layout(far, None, None))
        )
        case.receive()
        case.send()
        deliver(benches, wire)
        arrived = benches[FAR].arrived.pop()
        assert np.array_equal(np.asarray(arrived.payload), case.data)
        # JAX lets go of memory when its last array is gone.
        del arrived, case
        gc.collect()
        jnp.zeros(()).block_until_ready()
        assert benches[FAR].exchange.memory.allocated == 512 * 128 * 4, turn


@pytest.mark.parametrize("cut", [("a", None), (None, "a"), (None, None)])
def test_rows_of_zeros_at_the_ends_do_not_travel(
    benches: dict[str, Bench], wire: Wire, cut: tuple[str | None, str | None]
) -> None:
    """However both sides are sharded, in any order, also before the receiver is ready."""
    near, far = binding(1, (2,), [0, 1], NEAR), binding(2, (2,), [0, 1], FAR)
    for early in (False, True):
        ends = (near, layout(near, None, "a")), (far, layout(far, *cut))
        case = Case(benches, (8, 4), *ends, trimmed=True)
        if not early:
            case.receive()
        case.send()
        sent = sum(len(data) for _, _, buffers in wire.letters for data in buffers)
        assert sent == benches[NEAR].sent.pop()[-1] == 3 * 4 * 4
        wire.letters.reverse()
        deliver(benches, wire)
        if early:
            case.receive()
        arrived = benches[FAR].arrived.pop()
        assert np.array_equal(np.asarray(arrived.payload), case.data)
        assert arrived.nbytes == 3 * 4 * 4


class Edges:
    """Transfers of three hosts to one, each by a wire of its own; what happens next is random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.hosts = [f"island0/host{n}" for n in range(3)]
        self.wires = {host: Wire() for host in (*self.hosts, FAR)}
        self.benches = {host: Bench(host, wire) for host, wire in self.wires.items()}
        far = binding(9, (2,), [0, 1], FAR)
        self.cases = {}
        for step, host in enumerate(self.hosts):
            near = binding(1 + step, (2,), [0, 1], host)
            cut = rng.choice([("a", None), (None, "a")])
            ends = (near, layout(near, *cut)), (far, layout(far, None, None))
            self.cases[host] = Case(self.benches, (8, 4), *ends, trimmed=True, step=step)
        self.lost: set[str] = set()

    def run(self) -> None:
        """Send, receive, deliver one piece, or lose a link with all that is on it, in any order."""
        exchange = self.benches[FAR].exchange
        todo = [*((case, case.send) for case in self.cases.values()),
                *((case, case.receive) for case in self.cases.values())]  # fmt: skip
        while todo or any(wire.letters for wire in self.wires.values()):
            host = self.rng.choice(self.hosts)
            letters = self.wires[host].letters
            if todo and self.rng.random() < 0.4:
                todo.pop(self.rng.randrange(len(todo)))[1]()
            elif self.rng.random() < 0.03:
                self.lost.add(host)
                letters.clear()
                self.wires[host].broken = ConnectionError("broken")
                waiting = [case.key for case in self.cases.values()]
                exchange.submit(exchange.peer_lost, host, "broken", waiting)
            elif letters:
                _, fields, buffers = letters.pop(self.rng.randrange(len(letters)))
                hand_over(exchange, fields, buffers)
            self.benches[FAR].settle()
            for host in self.lost:
                self.wires[host].letters.clear()

    def close(self) -> None:
        for bench in self.benches.values():
            bench.exchange.close()


def broken(seed: int) -> str:
    """The problem, or "": each transfer ends once, whole, or failed where its link was lost."""
    edges = Edges(random.Random(seed))
    try:
        edges.run()
    finally:
        edges.close()
    arrived = edges.benches[FAR].arrived
    for host, case in edges.cases.items():
        ends = [end for end in arrived if end.action.key == case.key]
        if len(ends) != 1:
            return f"ended {len(ends)} times"
        if ends[0].failure is not None and host not in edges.lost:
            return f"failed: {ends[0].failure.message}"
        if ends[0].failure is None and not np.array_equal(np.asarray(ends[0].payload), case.data):
            return "a wrong value"
    return ""


def test_transfers_of_several_senders_end_once_in_any_order_and_with_links_lost() -> None:
    assert [broken(seed) for seed in range(20)] == [""] * 20


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("_keep", lambda self, key, take: None),
        ("_fail_if_from", lambda self, host, incoming, reason: None),
    ],
)
def test_without_early_pieces_or_news_of_lost_links_a_transfer_does_not_end(
    monkeypatch: pytest.MonkeyPatch, name: str, without: Any
) -> None:
    monkeypatch.setattr(Exchange, name, without)
    assert any(broken(seed) == "ended 0 times" for seed in range(10))


@pytest.mark.parametrize("rows", [(-1, 0), (0, 9), (2, 1)])
def test_rows_outside_of_their_box_fail_the_transfer(
    benches: dict[str, Bench], wire: Wire, rows: tuple[int, int]
) -> None:
    near, far = binding(1, (1,), [0], NEAR), binding(2, (1,), [0], FAR)
    case = Case(
        benches,
        (8, 4),
        (near, layout(near, None, None)),
        (far, layout(far, None, None)),
        trimmed=True,
    )
    case.receive()
    case.send()
    ((host, fields, _),) = wire.letters
    message = unpack_fields(Parts, fields)
    (part,) = message.parts
    wrong, exchange = replace(part, rows=rows), benches[host].exchange
    exchange.submit(exchange.parts, replace(message, parts=(wrong,)), [(wrong, b"")])
    benches[host].settle()
    (arrived,) = benches[FAR].arrived
    assert "rows" in arrived.failure.message  # type: ignore[union-attr]


def test_early_pieces_wait_for_their_grant_and_late_ones_are_thrown_away(
    benches: dict[str, Bench], wire: Wire
) -> None:
    near, far = binding(1, (2,), [0, 1], NEAR), binding(2, (1,), [0], FAR)
    ends = (near, layout(near, "a")), (far, layout(far, None))
    case = Case(benches, (8,), *ends)
    case.send()
    letters = list(wire.letters)
    deliver(benches, wire)
    assert benches[FAR].arrived == []
    case.receive()
    assert len(benches[FAR].arrived) == 1
    exchange = benches[FAR].exchange
    exchange.submit(exchange.run_over, 1)
    wire.letters = letters
    deliver(benches, wire)
    assert exchange._early == {}
    assert exchange._incoming == {}


def test_early_pieces_go_with_a_run_whose_turn_never_came(
    benches: dict[str, Bench], wire: Wire
) -> None:
    case = gathered(benches)
    case.send()
    deliver(benches, wire)
    exchange = benches[FAR].exchange
    assert exchange._early
    exchange.submit(exchange.run_over, 1)
    benches[FAR].settle()
    assert exchange._early == {}


@pytest.mark.parametrize("failure", [None, Failure("execute", "boom")])
def test_a_host_may_send_to_itself_before_its_target_is_open(
    benches: dict[str, Bench], failure: Failure | None
) -> None:
    near, beside = binding(1, (2,), [0, 1], NEAR), binding(2, (2,), [2, 3], NEAR)
    case = Case(benches, (8,), (near, layout(near, "a")), (beside, layout(beside, None)))
    case.send(failure)
    assert benches[NEAR].arrived == []
    case.receive()
    (arrived,) = benches[NEAR].arrived
    assert arrived.failure == failure
    assert failure or np.array_equal(np.asarray(arrived.payload), case.data)


def test_a_transfer_of_nothing_is_complete_at_once(benches: dict[str, Bench]) -> None:
    near, far = binding(1, (2,), [0, 1], NEAR), binding(2, (2,), [0, 1], FAR)
    case = Case(benches, (0, 4), (near, layout(near, None, "a")), (far, layout(far, "a", None)))
    case.receive()
    (arrived,) = benches[FAR].arrived
    assert arrived.payload is not None
    assert arrived.payload.shape == (0, 4)
    case.send()
    assert benches[NEAR].sent[0][1] is None


def test_a_failed_source_travels_as_its_failure(benches: dict[str, Bench], wire: Wire) -> None:
    case = gathered(benches)
    boom = Failure("execute", "boom")
    case.receive()
    case.send(boom)
    deliver(benches, wire)
    assert benches[FAR].arrived[0].failure == boom
    assert benches[NEAR].sent[0][1] == boom


def test_what_cannot_be_sent_is_a_failure_of_the_transfer(
    benches: dict[str, Bench], wire: Wire
) -> None:
    case = gathered(benches)
    wire.broken = ConnectionError("host is gone")
    case.send()
    ((_, failure, *_),) = benches[NEAR].sent
    assert failure is not None
    assert failure.kind == "lost"
    case.source.payload, wire.broken = None, None
    wire.letters.clear()
    case.send()
    assert "not on its devices" in benches[NEAR].sent[1][1].message  # type: ignore[union-attr]
    case.receive()
    deliver(benches, wire)
    (arrived,) = benches[FAR].arrived
    assert arrived.failure == benches[NEAR].sent[1][1], "whoever waits for it is told"


def test_a_broken_link_fails_exactly_those_who_wait_for_it(
    benches: dict[str, Bench], wire: Wire
) -> None:
    case = gathered(benches)
    case.receive()
    exchange = benches[FAR].exchange
    exchange.submit(exchange.peer_lost, "island2/host0", "gone")
    benches[FAR].settle()
    assert benches[FAR].arrived == []
    exchange.submit(exchange.peer_lost, NEAR, "gone")
    benches[FAR].settle()
    (arrived,) = benches[FAR].arrived
    assert arrived.failure is not None
    assert NEAR in arrived.failure.message


def test_a_link_that_broke_before_a_transfers_turn_fails_it_then(benches: dict[str, Bench]) -> None:
    """Parts that came over it may be lost, and will not be sent again."""
    case = gathered(benches)
    exchange = benches[FAR].exchange
    exchange.submit(exchange.peer_lost, NEAR, "gone", [(1, 0)])
    case.receive()
    (arrived,) = benches[FAR].arrived
    assert arrived.failure is not None
    assert NEAR in arrived.failure.message


@pytest.mark.parametrize("wrong", ["box", "size", "target", "twice"])
def test_a_wrong_piece_fails_its_transfer(
    benches: dict[str, Bench], wire: Wire, wrong: str
) -> None:
    case = gathered(benches)
    case.receive()
    case.send()
    ((host, fields, (first, *buffers)),) = wire.letters
    message = unpack_fields(Parts, fields)
    part, *others = message.parts
    if wrong == "box":
        part = replace(part, box=((1, 5),))
    elif wrong == "size":
        first += b"x"
    elif wrong == "target":
        part = replace(part, target=3)
    else:
        part = others[0]
    fields = pack_fields(replace(message, parts=(part, *others)))
    wire.letters = [(host, fields, [first, *buffers])]
    deliver(benches, wire)
    (arrived,) = benches[FAR].arrived
    assert arrived.failure is not None


def test_a_cancelled_transfer_is_forgotten(benches: dict[str, Bench], wire: Wire) -> None:
    case = gathered(benches)
    exchange = benches[FAR].exchange
    exchange.submit(exchange.cancel, (1, 0))
    case.receive()
    case.send()
    deliver(benches, wire)
    assert benches[FAR].arrived == []
    assert exchange._incoming == {}


def test_what_is_small_is_done_at_once_but_never_before_what_waits(benches: Any) -> None:
    exchange = benches[NEAR].exchange
    log: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        log.append((what, threading.current_thread() is threading.main_thread()))

    exchange.submit(note, "small", nbytes=10)
    assert log == [("small", True)]
    leave = threading.Event()
    exchange.submit(leave.wait, 10)
    exchange.submit(note, "large")
    exchange.submit(note, "small", nbytes=10)
    assert log == [("small", True)]
    leave.set()
    benches[NEAR].settle()
    assert log[1:] == [("large", False), ("small", False)]


def test_a_suspended_slice_without_room_in_its_host_s_memory_is_lost_alone(
    benches: dict[str, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host goes on, with everybody else's values."""
    here = binding(1, (2,), [0, 1], NEAR)
    case = Case(benches, (8,), (here, layout(here, "a")), (here, layout(here, "a")))
    bench, launcher, lost = benches[NEAR], Launcher(NEAR, "island0", None), list[tuple[int, str]]()
    launcher.buffers.bind(7, case.source)
    unused: Any = SimpleNamespace()
    tenants: Any = SimpleNamespace(where=lambda _: case.places[0])
    reports: Any = SimpleNamespace(unmoved=lambda *what: lost.append(what))
    parking = Parking(NEAR, launcher, tenants, unused, bench.exchange, reports)

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "array", full)
        parking.park(1)
        bench.settle()
    assert lost == [(1, f"an array could not be taken from the devices of {NEAR}: MemoryError")]
    assert case.source.payload is case.array
    assert case.source.users == 0


def test_a_part_goes_on_to_the_next_host_at_once(benches: dict[str, Bench], wire: Wire) -> None:
    """Also where nobody waits for it here, or not any more."""
    exchange = benches[FAR].exchange
    exchange.submit(exchange.run_over, 1)
    onward = (("island1/host1", 3), ("island1/host2", 5))
    part, beside = Part(2, ((0, 8),), onward=onward), Part(3, ((0, 8),))
    message = Parts(1, 0, (part, beside), 0.5)
    hand_over(exchange, pack_fields(message), [b"the bytes", b"not these"])
    benches[FAR].settle()
    ((host, fields, buffers),) = wire.letters
    assert (host, buffers) == ("island1/host1", [b"the bytes"])
    passed = replace(part, target=3, onward=onward[1:])
    assert unpack_fields(Parts, fields) == replace(message, parts=(passed,))


def test_hosts_that_parts_would_go_on_to_hear_that_they_will_not_come(
    benches: dict[str, Bench], wire: Wire
) -> None:
    """They have no link to the host that was lost, and would wait for ever."""
    case = gathered(benches)
    whole = case.route(FAR)
    (group,) = whole.groups
    pieces = tuple(replace(p, onward=(("island1/host1", 0),)) for p in group.pieces)
    case.receive(replace(whole, groups=(replace(group, pieces=pieces),)))
    exchange = benches[FAR].exchange
    exchange.submit(exchange.peer_lost, NEAR, "gone")
    benches[FAR].settle()
    ((host, fields, _),) = wire.letters
    assert host == "island1/host1"
    (arrived,) = benches[FAR].arrived
    assert arrived.failure is not None
    assert unpack_fields(Parts, fields).failure == arrived.failure
