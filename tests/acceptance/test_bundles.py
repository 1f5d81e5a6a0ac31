"""Arrays that go together cost together, and are single arrays to whoever uses them so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.lab.lab import Lab
from pathways_lab.client.session.handles import Handle
from pathways_lab.core.errors import Failure, PathwaysError
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster
MANY = 24


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=2) as lab:
        yield lab


@pytest.fixture(scope="module")
def s(lab: Lab) -> Any:
    return lab.slice(2)


def start(s: Any, many: int = MANY) -> list[Handle]:
    return [pw.device_put(np.full(4, n, np.float32), s) for n in range(many)]


def values(tree: Any) -> list[float]:
    return [float(np.asarray(each).ravel()[0]) for each in jax.tree.leaves(jax.device_get(tree))]


def step_of(s: Any, donate: bool) -> Any:
    def step(tree: list[Any], add: Any) -> tuple[list[Any], Any]:
        return [x + add for x in tree], sum(x.sum() for x in tree)

    return pw.jit(step, on=s, donate_argnums=(0,) if donate else None)


def bundled(s: Any, donate: bool = False) -> tuple[Any, list[Handle]]:
    """A step that has a habit, and what it made last: 3 more than at the start."""
    step, tree = step_of(s, donate), start(s)
    for _ in range(3):
        tree, _ = step(tree, 1)
    assert len({h.buffer_id for h in tree}) == 1
    return step, tree


@pytest.mark.parametrize("donate", [False, True])
def test_a_training_loop_has_one_buffer_for_its_state(lab: Lab, s: Any, donate: bool) -> None:
    step, tree = step_of(s, donate), start(s)
    sent = lab.session.connection.traffic.sent
    before = sum(sent.values())
    for count in range(6):
        tree, loss = step(tree, 1)
        assert float(loss) == 4 * sum(n + count for n in range(MANY))
        if count > 2:
            assert len({h.buffer_id for h in tree}) == 1
            assert loss.buffer_id != tree[0].buffer_id
    assert values(tree) == [n + 6 for n in range(MANY)]
    assert sum(sent.values()) - before < 40


def test_one_array_is_read_without_taking_the_others_apart(s: Any) -> None:
    _, tree = bundled(s)
    assert tree[5].result()[0] == 8
    assert values(tree) == [n + 3 for n in range(MANY)]
    assert len({h.buffer_id for h in tree}) == 1


def test_one_array_is_passed_on_by_itself(s: Any) -> None:
    step, tree = bundled(s)
    double = pw.jit(lambda x: x * 2, on=s)
    assert values(double(tree[7])) == [20]
    assert values(double(tree[0])) == [6]
    tree, _ = step(tree, 1)
    assert values(tree) == [n + 4 for n in range(MANY)]


def test_a_part_is_donated_and_the_rest_stays(s: Any) -> None:
    _, tree = bundled(s)
    take = pw.jit(lambda part: [x * 2 for x in part], on=s, donate_argnums=0)
    made = take(tree[:10])
    assert values(made) == [2 * (n + 3) for n in range(10)]
    assert [h.is_deleted() for h in tree] == [True] * 10 + [False] * (MANY - 10)
    assert values(tree[10:]) == [n + 3 for n in range(10, MANY)]


def test_the_habit_follows_what_is_used_together(s: Any) -> None:
    step, tree = step_of(s, False), start(s)
    half = pw.jit(lambda part: [x + 0 for x in part], on=s)
    for _ in range(4):
        tree, _ = step(tree, 1)
        part = half(tree[:10])
    assert [h.buffer_id for h in tree[:10]] == [tree[0].buffer_id] * 10
    assert [h.buffer_id for h in tree[10:]] == [tree[10].buffer_id] * (MANY - 10)
    assert values(part) == [n + 4 for n in range(10)]


def test_what_was_donated_says_by_whom(s: Any) -> None:
    step, tree = bundled(s, donate=True)
    new, _ = step(tree, 1)
    for dead in (tree[0], tree[-1]):
        assert dead.state == "dead"
        with pytest.raises(PathwaysError, match="donated to 'step'"):
            dead.result()
        with pytest.raises(PathwaysError, match="donated to 'step'"):
            step([dead, *new[1:]], 1)
    assert values(new) == [n + 4 for n in range(MANY)]
    with pytest.raises(PathwaysError, match="the same handle is passed twice"):
        step([*new[:-1], new[0]], 1)
    assert values(new) == [n + 4 for n in range(MANY)]


def test_memory_of_dropped_arrays_is_given_back(lab: Lab, s: Any) -> None:
    step, tree = (
        step_of(s, False),
        [pw.device_put(np.zeros(1 << 16, np.float32), s) for _ in range(MANY)],
    )
    for _ in range(3):
        tree, _ = step(tree, 1)
    del tree[4:]
    kept, one = lab.memory, (1 << 16) * 4
    until(lambda: sum(v.nbytes for v in kept().values) <= 2 * one * 6)
    assert values(tree) == [3] * 4


def test_a_deleted_array_is_gone_and_no_other(s: Any) -> None:
    _, tree = bundled(s)
    tree[3].delete()
    assert [h.is_deleted() for h in tree[:5]] == [False, False, False, True, False]
    assert values([*tree[:3], *tree[4:]]) == [n + 3 for n in range(MANY) if n != 3]


@pytest.mark.parametrize("donate", [False, True])
def test_arrays_between_the_calls_of_a_program_are_one_value(
    lab: Lab, s: Any, donate: bool
) -> None:
    step = step_of(s, donate)

    @pw.program
    def program(tree: list[Any]) -> tuple[list[Any], list[Any]]:
        losses = []
        for _ in range(3):
            tree, loss = step(tree, 1)
            losses.append(loss)
        return tree, losses

    plan = program.capture(start(s)).prepared.plan
    assert sorted(len(value.leaves) for value in plan.values)[-3:] == [0, MANY, MANY]
    for _ in range(2):
        tree, losses = program(start(s))
        assert values(tree) == [n + 3 for n in range(MANY)]
        assert values(losses) == [4 * sum(n + count for n in range(MANY)) for count in (0, 1, 2)]
        assert tree[7].result()[0] == 10
    with lab.check_nans():
        assert values(program(start(s))[0]) == [n + 3 for n in range(MANY)]


def test_programs_and_publications_take_single_arrays(lab: Lab, s: Any) -> None:
    _, tree = bundled(s)

    @pw.program
    def program(tree: list[Any]) -> list[Any]:
        f = pw.jit(lambda x: x * 2, on=s)
        return [f(x) for x in tree]

    assert values(program(tree)) == [2 * (n + 3) for n in range(MANY)]
    _, tree = bundled(s)
    lab.publish("tree", tree)
    assert len({h.buffer_id for h in tree}) == MANY
    assert values(tree) == [n + 3 for n in range(MANY)]
    lab.unpublish("tree")


def test_a_failure_reaches_every_array(s: Any) -> None:
    def fail(tree: list[Any], wrong: Any) -> list[Any]:
        def look(wrong: Any) -> Any:
            if wrong > 0:
                raise ValueError("it is wrong")
            return np.float32(0)

        bad = jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), wrong)
        return [x + bad for x in tree]

    f, tree = pw.jit(fail, on=s), start(s)
    for _ in range(3):
        tree = f(tree, 0)
    assert len({h.buffer_id for h in tree}) == 1
    good, tree = tree, f(tree, 1)
    for handle in (tree[0], tree[-1]):
        with pytest.raises(PathwaysError, match="it is wrong"):
            handle.result()
    with pytest.raises(PathwaysError, match="it is wrong"):
        pw.jit(lambda x: x, on=s)(tree[3]).result()
    assert values(good) == list(range(MANY))


def test_bundles_are_suspended_and_resumed_elsewhere(lab: Lab) -> None:
    s = lab.slice(2)
    step, tree = bundled(s)
    tree[0].block_until_ready()
    name = lab.session.connection.name
    lab.suspend(name)
    assert tree[2].result()[0] == 5
    lab.resume(name)
    tree, _ = step(tree, 1)
    assert values(tree) == [n + 4 for n in range(MANY)]


def test_a_call_whose_bundle_another_thread_takes_apart_has_the_arrays(
    lab: Lab, s: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, tree = bundled(s)
    session, bundle = lab.session, tree[0]._bundle
    assert bundle is not None
    checked = session._check_donation

    def meanwhile(*args: Any) -> None:
        session.take_apart(bundle)
        checked(*args)

    monkeypatch.setattr(session, "_check_donation", meanwhile)
    new, _ = step(tree, 1)
    assert values(new) == [n + 4 for n in range(MANY)]
    assert values(tree) == [n + 3 for n in range(MANY)]


def test_an_array_that_is_asked_for_while_its_bundle_is_taken_apart_is_the_right_one(
    lab: Lab, s: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tree = bundled(s)
    session, bundle = lab.session, tree[0]._bundle
    assert bundle is not None
    fetch = session.data.fetch

    def meanwhile(buffer: Any, *args: Any) -> Any:
        session.take_apart(bundle)
        tree[0].block_until_ready()
        s_other = pw.jit(lambda x: x, on=s)(tree[0])
        s_other.block_until_ready()  # the bundle is gone on its host
        return fetch(buffer, *args)

    monkeypatch.setattr(session.data, "fetch", meanwhile)
    assert tree[5].result()[0] == 8


def test_a_bundle_that_cannot_be_taken_apart_stays_one(
    lab: Lab, s: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, tree = bundled(s)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PathwaysError(Failure("refused", "not now"))

    with monkeypatch.context() as patch:
        patch.setattr(lab.session._calls, "add", fail)
        with pytest.raises(PathwaysError, match="not now"):
            pw.jit(lambda x: x * 2, on=s)(tree[3])
    assert values(pw.jit(lambda x: x * 2, on=s)(tree[3])) == [12]
    new, _ = step(tree, 1)
    assert values(new) == [n + 4 for n in range(MANY)]


def test_calls_with_bundles_are_cancelled_with_their_function(lab: Lab, s: Any) -> None:
    step, tree = bundled(s)
    assert len({plan.key for (prepared,) in [step.ready] for plan in prepared.plans}) == 3
    submitted = {plan.key for run in lab.session.connection.runs for plan in run.plans}
    assert submitted <= {plan.key for prepared in step.ready for plan in prepared.plans}
    assert values(tree) == [n + 3 for n in range(MANY)]


def test_arrays_of_a_bundle_are_looked_at_for_nans(lab: Lab, s: Any) -> None:
    f, tree = pw.jit(lambda t: [x * 2 for x in t], on=s, name="twice"), start(s)
    for _ in range(3):
        tree = f(tree)
    with lab.check_nans(infs=True):
        tree = f(tree)
        assert values(tree) == [n * 16 for n in range(MANY)]
        big = pw.device_put(np.full(4, 3e38, np.float32), s)
        tree = f([*tree[:-1], big])
        with pytest.raises(PathwaysError, match=r"twice has made an infinity: .* result 23"):
            tree[-1].result()


def test_random_uses_are_those_of_single_arrays(lab: Lab, s: Any) -> None:
    """A model in NumPy, and arrays that are stepped, donated, picked, read and dropped."""
    rng = random.Random(7)
    fresh = pw.jit(lambda t: [x + 1 for x in t], on=s)
    eaten = pw.jit(lambda t: [x + 1 for x in t], on=s, donate_argnums=0)
    pools: list[tuple[list[float], list[Handle]]] = [
        ([float(n) for n in range(MANY)], start(s)),
        ([float(n) for n in range(12)], start(s, 12)),
    ]
    for _ in range(250):
        at = rng.randrange(len(pools))
        want, have = pools[at]
        what = rng.choice(["step", "step", "step", "eat", "read", "part", "drop", "mix"])
        if what == "step":
            pools[at] = [x + 1 for x in want], fresh(have)
        elif what == "eat":
            pools[at] = [x + 1 for x in want], eaten(have)
        elif what == "read":
            n = rng.randrange(len(have))
            assert have[n].result()[0] == want[n]
        elif what == "part":
            a = rng.randrange(len(have))
            b = rng.randrange(a, len(have)) + 1
            pools.append(([x + 1 for x in want[a:b]], fresh(have[a:b])))
        elif what == "drop" and len(pools) > 2:
            del pools[at]
        elif what == "mix":
            n = rng.randrange(len(have))
            (made,) = eaten([have[n]])
            have, want = [*have], [*want]
            have[n], want[n] = made, want[n] + 1
            pools[at] = want, have
        del want, have
        if len(pools) > 5:
            del pools[0]
    for want, have in pools:
        assert values(have) == want
    del pools, have
    until(lambda: not [v for v in lab.memory().values if v.owner and "bundle" in v.name])
