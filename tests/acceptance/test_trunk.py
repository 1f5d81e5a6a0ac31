"""A function with its weights that others call: joined, each with their own results, once."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pathways_lab as pw
from pathways_lab.client.trunk.trunk import RemoteTrunk, ServingTrunk
from tests.runtime.processes import until

pytestmark = pytest.mark.cluster

WIDTH = 16
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32)


def layer(params: Any, x: Any, lora: Any = None) -> Any:
    """A row that meets another row, of whomever, would show in all of them."""
    y = x @ params["w"] + x.mean()
    return {"y": y if lora is None else y + (x @ lora["a"]) @ lora["b"]}


def lora(rank: int) -> dict[str, Any]:
    sizes = {"a": (WIDTH, rank), "b": (rank, WIDTH)}
    return {key: RNG.normal(size=size).astype(np.float32) for key, size in sizes.items()}


X = np.ones((2, WIDTH), np.float32)


def serve(lab: pw.Lab, *args: Any, **options: Any) -> ServingTrunk:
    made = lab.trunk(*args, **options)
    assert isinstance(made, ServingTrunk)
    return made


@pytest.fixture(scope="module")
def guests(lab: pw.Lab) -> Iterator[list[pw.Lab]]:
    assert lab.embedded is not None
    made = [pw.Lab(lab.embedded.control, name=name) for name in ("bob", "eve", "joe")]
    yield made
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def trunk(lab: pw.Lab) -> Iterator[ServingTrunk]:
    """On two devices, the weights cut over both; calls wait for each other for a second."""
    s = lab.slice(2, ("d",), island="island0")
    params = {"w": pw.device_put(WEIGHTS, s.sharding(jax.P("d")))}
    with serve(lab, "gpt", layer, params, on=s, most=4, wait=1.0) as made:
        yield made


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def test_calls_of_several_clients_are_one_gang_and_each_has_its_own_results(
    lab: pw.Lab, guests: list[pw.Lab], trunk: ServingTrunk
) -> None:
    theirs = [guest.trunk("gpt") for guest in guests]
    assert repr(theirs[0]) == f"<trunk 'gpt' of {lab.name}>"
    xs = [RNG.normal(size=(2, WIDTH)).astype(np.float32) for _ in range(4)]
    gangs = trunk.gangs
    made = at_once([
        lambda call=call, x=x: call(x)  # type: ignore[misc]
        for call, x in zip([*theirs, trunk], xs, strict=True)
    ])  # fmt: skip
    assert trunk.gangs == gangs + 1, "four calls are a full gang: nobody waits for a second"
    for handles, x in zip(made, xs, strict=True):
        np.testing.assert_allclose(
            handles["y"].result(), layer({"w": WEIGHTS}, x)["y"], rtol=1e-5, atol=1e-6
        )
    assert {**trunk.calls} == {"bob": 1, "eve": 1, "joe": 1, lab.name: 1}
    weights = [v for v in lab.memory().values if v.nbytes == WEIGHTS.nbytes]
    assert len(weights) == 1, "one trunk for everybody"
    # Names are nobody else's.
    assert guests[0].published == {"gpt": lab.name}


def test_the_order_in_which_calls_come_makes_no_programs(lab: pw.Lab, guests: list[pw.Lab]) -> None:
    on = lab.slice(1)
    params = {"w": pw.device_put(WEIGHTS, on)}
    handles = [pw.device_put(X, guest.slice(1)) for guest in guests]
    with serve(lab, "gpt of three", layer, params, on=on, most=3, wait=60.0) as trunk:
        calls = [guest.trunk("gpt of three") for guest in guests]
        for gangs, order in enumerate(itertools.permutations(range(3))):
            with ThreadPoolExecutor(3) as pool:
                made = []
                for place, number in enumerate(order, 1):
                    made.append(pool.submit(calls[number], handles[number]))
                    until(
                        lambda gangs=gangs, place=place: (  # type: ignore[misc]
                            trunk.gangs > gangs if place == 3 else trunk.waiting == place
                        )
                    )
                for each in made:
                    np.testing.assert_allclose(
                        each.result()["y"].result(), layer({"w": WEIGHTS}, X)["y"], rtol=1e-5
                    )
        (compiled,) = trunk._joined._compiled.values()
        assert len(compiled.repeats) == 1


def test_a_slice_of_another_client_is_one_object_however_often_its_arrays_are_taken(
    guests: list[pw.Lab],
) -> None:
    giver, taker = guests[0], guests[1]
    x = pw.device_put(X, giver.slice(1))
    giver.publish("twice", [x, x])
    taken = [*taker.take("twice", wait=60), *taker.take("twice")]
    assert {h.slice for h in taken} == {taken[0].slice}
    giver.unpublish("twice")


def test_adapters_of_unlike_ranks_go_together_and_have_their_own_gradients(
    guests: list[pw.Lab], trunk: ServingTrunk
) -> None:
    adapters = [lora(2), lora(5), lora(3)]
    xs = [RNG.normal(size=(2, WIDTH)).astype(np.float32) for _ in adapters]
    gangs = trunk.gangs

    def step(guest: pw.Lab, x: Any, adapter: Any) -> Any:
        y, pull = guest.trunk("gpt").vjp(x, adapter)
        return y, pull(y)

    made = at_once([
        lambda each=each: step(*each)  # type: ignore[misc]
        for each in zip(guests, xs, adapters, strict=True)
    ])  # fmt: skip
    assert trunk.gangs == gangs + 2
    for (y, gradients), x, adapter in zip(made, xs, adapters, strict=True):
        wanted, pull = jax.vjp(lambda a, x=x: layer({"w": WEIGHTS}, x, a), adapter)
        np.testing.assert_allclose(y["y"].result(), wanted["y"], rtol=1e-4, atol=1e-5)
        jax.tree.map(
            lambda g, w: np.testing.assert_allclose(g.result(), w, rtol=1e-4, atol=1e-4),
            *(gradients, pull(wanted)[0]),
        )


def test_wrong_calls_are_refused_and_the_next_one_is_well(
    lab: pw.Lab, guests: list[pw.Lab], trunk: ServingTrunk
) -> None:
    s = lab.slice(1)
    with serve(lab, "gpt odd", lambda w, x: (jax.tree_util.Partial(abs, x),), {}, on=s) as odd:
        until(lambda: "gpt odd" in guests[0].published)
        with pytest.raises(pw.PathwaysError, match="what the function returns cannot be given"):
            guests[0].trunk("gpt odd")(X)
        assert odd.gangs == 1
    call = guests[0].trunk("gpt")
    with pytest.raises(pw.PathwaysError, match=r"the trunk 'gpt' of .*: .*dot_general requires"):
        call(np.ones((2, WIDTH + 1), np.float32))
    with pytest.raises(pw.PathwaysError, match="inside of a program"):
        pw.program(lambda x: call(x))(np.ones((2, WIDTH), np.float32))
    with pytest.raises(pw.PathwaysError, match="there is gpt"):
        guests[0].trunk("other")
    guests[0].publish("trunk 3 gpt what", {"x": 1}, to=trunk.server)
    with pytest.raises(pw.PathwaysError, match="published something under this name"):
        guests[0].publish("gpt", {"trunk": 1})
    answer = guests[0].take("trunk 3 gpt what", wait=60)
    assert answer == {"refused": "this is no call of a trunk: 'what'"}
    fields = {"name": "trunk 3 gpt words", "buffers": [], "to": trunk.server}
    guests[0].session.connection.questions.ask("publish", fields, buffers=[b"no words"])
    assert "described wrongly" in guests[0].take("trunk 3 gpt words", wait=60)["refused"]
    assert call(np.ones((2, WIDTH), np.float32))["y"].result().shape == (2, WIDTH)


def test_what_is_given_to_one_client_is_nobody_elses(lab: pw.Lab, guests: list[pw.Lab]) -> None:
    bob, eve, _ = guests
    x = pw.device_put(WEIGHTS, lab.slice(1))
    lab.publish("for bob", {"x": x}, to="bob")
    until(lambda: "for bob" in bob.published)
    assert "for bob" not in {**lab.published, **eve.published}
    with pytest.raises(pw.PathwaysError, match="nothing is published under this name"):
        eve.take("for bob")
    assert np.array_equal(bob.take("for bob")["x"].result(), WEIGHTS)
    with pytest.raises(pw.PathwaysError, match="nothing is published under this name"):
        bob.take("for bob")
    with pytest.raises(pw.PathwaysError, match="there is no client 'nobody'"):
        lab.publish("x", x, to="nobody")


def test_a_trunk_that_ends_says_so_to_those_who_wait(lab: pw.Lab, guests: list[pw.Lab]) -> None:
    s = lab.slice(1)
    params = pw.device_put(WEIGHTS, s)
    closing = serve(lab, "slow", lambda params, x: x, params, on=s, wait=600.0)
    until(lambda: "slow" in guests[0].published)
    call, found = guests[0].trunk("slow"), []

    def asks() -> None:
        try:
            call(jnp.ones(3))
        except pw.PathwaysError as error:
            found.append(error.failure)

    asking = threading.Thread(target=asks)
    asking.start()
    until(lambda: closing.waiting == 1)
    closing.close()
    asking.join(60)
    assert [failure.kind for failure in found] == ["lost"]
    assert f"the trunk 'slow' is gone: {lab.name} has closed it" in found[0].message
    assert "closed" in repr(closing)


def test_nobody_else_answers_or_stops_a_call(
    guests: list[pw.Lab], trunk: ServingTrunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eve knows the name of Bob's next call, and gives Bob and the server something under it."""
    bob, eve, _ = guests
    call = bob.trunk("gpt")
    right = call(X)["y"].result()
    monkeypatch.setattr(RemoteTrunk, "_numbers", itertools.count(10**6))
    name, false = f"trunk 3 gpt bob {10**6}", pw.device_put(0 * X, eve.slice(1))
    eve.publish(name, {"made": {"y": false}}, to="bob")
    eve.publish(name, {"what": "call", "args": (false, None)}, to=trunk.server)
    until(lambda: ("eve", name) in bob.session.connection.given)
    np.testing.assert_allclose(call(X)["y"].result(), right, rtol=1e-5)
    assert np.array_equal(bob.take(name)["made"]["y"].result(), 0 * X)


def test_the_answer_to_a_call_that_was_given_up_keeps_no_memory(
    guests: list[pw.Lab], trunk: ServingTrunk
) -> None:
    call, given = guests[0].trunk("gpt"), guests[0].session.connection.given
    with pytest.MonkeyPatch.context() as patched:

        def interrupted(*_: Any) -> None:
            patched.undo()
            until(lambda: trunk.waiting == 1)  # too late to take it back
            raise KeyboardInterrupt

        patched.setattr(guests[0].session.connection.board, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(X)
    until(lambda: bool(given))
    call(X)["y"].result()
    assert not given


def until_there(path: Path, value: Any) -> Any:
    while not path.exists():
        time.sleep(0.01)
    return value


def test_a_call_whose_argument_fails_or_comes_late_is_nobody_elses_matter(
    guests: list[pw.Lab], trunk: ServingTrunk, tmp_path: Path
) -> None:
    x, shape = np.ones((2, WIDTH), np.float32), jax.ShapeDtypeStruct((2, WIDTH), np.float32)
    bob, eve, joe = guests

    def late(guest: pw.Lab) -> Any:
        on, file = guest.slice(1, island="island1"), tmp_path / guest.name
        call = functools.partial(until_there, file)
        return pw.jit(lambda v: jax.pure_callback(call, shape, v), on=on, window=0.0)

    bobs, eves = late(bob)(x), late(eve)
    first = eves(x)
    never = eves(first)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(lambda: bob.trunk("gpt")(bobs)["y"].result())
        fails = pool.submit(lambda: eve.trunk("gpt")(never))
        made = joe.trunk("gpt")(x)["y"].result()
        eve.cancel(never)
        with pytest.raises(pw.PathwaysError, match="cancelled by eve"):
            fails.result()
        assert not asked.done()
        for guest in (bob, eve):
            (tmp_path / guest.name).touch()
        np.testing.assert_array_equal(asked.result(), made)
