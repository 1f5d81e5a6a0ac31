"""Laws: no random workload breaks the rules, and without any one of them some workload does.

The full search is ``python -m tests.sim.search --seeds 10000``; here a
few hundred of its workloads, and for every rule the counter-examples that it
found: workloads that break without the rule, and do not break with it.
"""

from __future__ import annotations

from typing import Any

import pytest

from pathways_lab.core.memory.accounts import Accounts
from pathways_lab.core.memory.store import BufferRecord, Store
from pathways_lab.core.memory.uploads import Uploads
from pathways_lab.core.program.code_gc import Forgetting
from pathways_lab.core.scheduling.cancelling import Cancelling
from pathways_lab.core.scheduling.outcomes import Outcomes
from pathways_lab.core.scheduling.remote_policy import Questions
from pathways_lab.core.scheduling.runs import RunRecord
from pathways_lab.core.slices.keeping import Keeping
from pathways_lab.core.slices.sharing import Sharing
from pathways_lab.executor.buffers import Buffers
from pathways_lab.executor.device_memory import Claim, Memory
from pathways_lab.executor.launcher import Launcher
from pathways_lab.executor.order import Order
from pathways_lab.executor.segments import Segments
from pathways_lab.executor.transfers import Moves
from pathways_lab.sim.host import Host
from pathways_lab.sim.network import Movement, Network
from tests.sim.drafts import Shape
from tests.sim.search import (
    DECIDING,
    EXCHANGING,
    KEEPING,
    STORM,
    STRAIGHT,
    WITHOUT,
    main,
    search,
    shape_of,
)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_workload_breaks_the_rules(first: int) -> None:
    for seed in range(first, first + 50):
        assert search(seed).broken == ""


def test_exchanges_of_rows_with_experts_begin_whole_and_end_once() -> None:
    """Some 300 of the 100,000 that the command looks at: late, out of order, with hosts lost."""
    assert [search(seed, EXCHANGING).broken for seed in range(15)] == [""] * 15


KEPT = {
    "liveness": (16, 69, 103),
    "memory": (26, 34, 49),
    "order": (1, 3, 6),
    "overtaking": (2, 3, 8),
    "peak": (1, 24, 34),
    "poison": (11, 26, 54),
    "predecessors": (3, 4, 11),
    "producers": (42, 71, 89),
    "quotas": (1, 3, 7),
    "stalemate": (24, 34, 36),
    "together": (24, 57, 64),
}
"""Counter-examples: seeds by the rule that they need.

A change of the core may make one of them harmless; ``--without RULE --keep-going``
finds others.
"""


def test_every_rule_has_counter_examples() -> None:
    assert KEPT.keys() == WITHOUT.keys()


@pytest.mark.parametrize("rule", sorted(WITHOUT))
def test_without_the_rule_its_counter_examples_break_and_with_it_they_do_not(rule: str) -> None:
    shape = shape_of(0, rule)
    assert any(search(seed, shape, without=rule).broken for seed in KEPT[rule])
    assert not any(search(seed, shape).broken for seed in KEPT[rule])


def _reference_stays(self: Store, number: int) -> BufferRecord:
    return self.references[number]


def _wrong_now_and_then(self: Host, buffer: int, where: int, nbytes: int) -> None:
    upload(self, buffer, where, nbytes)
    if buffer % 5 == 0:
        slot = self.launcher.buffers.get(buffer)
        if slot is not None:
            slot.payload += 1


def _drops_anothers(self: Store, record: BufferRecord) -> None:
    drop(self, record)
    victim = next(iter(self.buffers.values()), None)
    if victim is not None and victim.state == "resident":
        drop(self, victim)


upload, drop = Host.upload, Store.drop


@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (Uploads, "reject", lambda self, number, hosts: None, "still keeps"),
        (Sharing, "names_of", lambda self, client: [], "is left"),
        (Store, "end_reference", _reference_stays, "left behind"),
        (Host, "upload", _wrong_now_and_then, "wrong value"),
        (Store, "drop", _drops_anothers, "store has nothing for it"),
        (Accounts, "change", lambda self, client, nbytes: None, ""),
        (Forgetting, "_over", lambda self, runs: True, "which nobody knows"),
        (Forgetting, "keep", lambda self, client, plan: None, "registers what it runs"),
        (Outcomes, "_unread", lambda self, buffer: None, "unread results"),
        (Cancelling, "released", lambda self, slice_id, client: None, "waits for a released"),
    ],
)
def test_without_what_protects_those_who_stay_workloads_break(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any, words: str
) -> None:
    """Nothing of who has left, no result lost, none wrong, bytes counted: each is looked at."""
    monkeypatch.setattr(owner, name, broken)
    found = (search(seed, STORM).broken for seed in range(80))
    assert any(text and words in text for text in found)


def _hears_of_no_failure(self: Segments, key: Any, times: Any, failures: Any) -> None:
    segment_done(self, key, times, {})


segment_done = Segments.done


def _first_sender_is_enough(self: Network, movement: Movement, name: str, key: Any) -> None:
    """All that a host awaits in this run counts as come, with the first of it."""
    for step, other in [(key[1], movement), *self.moving.get(key[0], {}).items()]:
        if name in other.targets:
            other.arrived.add(name)
            self._deliver(other, name, (key[0], step))


CROWDED = Shape(
    hosts=3, devices=3, slices=4, nodes=8, runs=12, memory=(60, 90), cancel=0.0, fail=0.0, lose=0.0
)
"""Slices that share some of their devices."""


@pytest.mark.parametrize(
    ("owner", "name", "broken", "shape", "seeds", "words"),
    [
        (Order, "_before", lambda self, unit: {}, CROWDED, (19, 27, 53, 57), ""),
        (Segments, "done", _hears_of_no_failure, STRAIGHT, (97, 164), "wrong value"),
        (Moves, "cancel", lambda self, move, failure: None, STRAIGHT, (51, 65), "ended 0 times"),
        (Buffers, "release", lambda self, slot: None, STRAIGHT, (1, 4), "still holds"),
        (Launcher, "uploaded", lambda self, *upload: [], STRAIGHT, (1, 10), "is not on "),
        (Network, "_arrive", _first_sender_is_enough, EXCHANGING, (4, 6), "wrong value"),
    ],
)
def test_without_what_hosts_decide_by_workloads_break(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    broken: Any,
    shape: Shape,
    seeds: tuple[int, ...],
    words: str,
) -> None:
    """The hosts of the search decide by the code of real ones, rows of gangs included."""
    assert not any(search(seed, shape).broken for seed in seeds)
    monkeypatch.setattr(owner, name, broken)
    found = (search(seed, shape).broken for seed in seeds)
    assert any(text and words in text for text in found)


def test_without_the_end_of_lost_seats_workloads_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients keep values, leave, and come back, while hosts die."""
    assert not any(search(seed, KEEPING).broken for seed in range(2))
    monkeypatch.setattr(Keeping, "lost", lambda self: None)
    assert any("failed" in search(seed, KEEPING).broken for seed in range(80))


def _undecided_is_taken(self: RunRecord, step: int) -> bool:
    return taken(self, step) is not False


taken = RunRecord.taken


@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (RunRecord, "taken", _undecided_is_taken, "InvalidTransition"),
        (Outcomes, "skipped", lambda self, run, steps: None, "ended 0 times"),
    ],
)
def test_without_what_decisions_rest_on_workloads_break(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any, words: str
) -> None:
    """A step waits for its decision, and what is not taken holds up nobody."""
    seeds = (2, 5)
    assert not any(search(seed, DECIDING).broken for seed in seeds)
    monkeypatch.setattr(owner, name, broken)
    assert any(words in search(seed, DECIDING).broken for seed in seeds)


def test_a_core_that_waits_for_an_answer_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that answer from elsewhere are searched for too."""
    monkeypatch.setattr(Questions, "answered", lambda self, question, run: None)
    assert any("ended 0 times" in search(seed).broken for seed in range(0, 60, 3))


def test_a_host_that_launches_what_fits_out_of_the_order_of_grants_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever finds room takes it: then earlier grants wait for later ones."""

    def selfish(self: Memory[Any], claim: Claim) -> bool:
        assert self.limit is not None
        need = claim.need()
        return all(self.used.get(d, 0) + need <= self.limit for d in claim.locals)

    monkeypatch.setattr(Memory, "_fits", selfish)
    shape = shape_of(0, "liveness")
    assert any("ended 0 times" in search(seed, shape).broken for seed in (24, 28, 49))


def test_a_workload_is_the_same_every_time() -> None:
    assert search(11) == search(11)


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5"]) == 0
    assert "5 workloads" in capsys.readouterr().out
    assert main(["--seeds", "50", "--without", "order"]) == 0
    assert f"seed {KEPT['order'][0]}: " in capsys.readouterr().out
    assert main(["--seeds", "1", "--without", "poison"]) == 1  # and found nothing
