"""Handles: promises that are waited for, passed on, interrupted, and free what they hold."""

from __future__ import annotations

import asyncio
import copy
import gc
import operator
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.client.lab import stats
from pathways_lab.client.program.cell_program import CellProgram
from pathways_lab.core.errors import Failure
from pathways_lab.transport.codec import pack
from pathways_lab.transport.framing import Letter
from tests.client.kit import FakeLab
from tests.runtime.processes import until

V = np.arange(1, 9, dtype=np.float32)


@pytest.fixture
def double(fake: FakeLab) -> Any:
    def double(x: Any) -> Any:
        return x * 2  # the users line

    return pw.jit(double, on=fake.slice(4), in_shardings=P("x"))


# --- waiting --------------------------------------------------------------------------


def test_a_handle_is_known_at_once_and_valued_later(fake: FakeLab, double: Any) -> None:
    fake.held = True
    h = double(V)
    assert (h.shape, str(h.dtype), h.ndim, h.size, h.nbytes) == ((8,), "float32", 1, 8, 32)
    assert h.sharding.spec == P("x")
    assert h.sharding.mesh == h.slice.mesh
    assert (h.state, h.is_ready()) == ("pending", False)
    assert "the value comes after the run" in repr(h)
    assert "float32[8]" in h._repr_html_()
    with pytest.raises(TimeoutError, match="it goes on"):
        h.result(timeout=0.01)
    fake.release()
    np.testing.assert_array_equal(h.result(), V * 2)
    assert (h.state, h.is_ready()) == ("ready", True)


def test_trees_of_handles_with_jax_functions(fake: FakeLab, double: Any) -> None:
    tree = {"a": double(V), "b": [double(V + 1), 3, None]}
    assert jax.block_until_ready(tree) is tree
    got = jax.device_get(tree)
    np.testing.assert_array_equal(got["b"][0], (V + 1) * 2)
    assert got["b"][1:] == [3, None]
    assert not got["a"].flags.writeable


def test_a_tree_that_was_fetched_and_saved_is_put_back_as_it_was_cut(
    fake: FakeLab, double: Any
) -> None:
    tree = {"a": double(V), "b": [double(V + 1), None]}
    values = pickle.loads(pickle.dumps(jax.device_get(tree)))
    back = pw.device_put(values, jax.tree.map(lambda h: h.sharding, tree))
    assert (back["a"].sharding, back["b"][1]) == (tree["a"].sharding, None)
    np.testing.assert_array_equal(back["b"][0].result(), (V + 1) * 2)


def test_values_as_python_numbers(fake: FakeLab, double: Any) -> None:
    h = double(V)[3]
    assert (float(h), int(h), bool(h), complex(h), h.item()) == (8.0, 8, True, 8, 8.0)
    assert f"{h:.2f}" == "8.00"
    assert list(range(8))[double(V).astype(int)[2]] == 6
    assert [float(x) for x in double(V)] == list(V * 2)
    assert double(V).tolist() == list(V * 2)


def test_await_in_a_running_loop(fake: FakeLab, double: Any) -> None:
    fake.held = True
    handles = [double(V), double(V + 1)]
    threading.Timer(0.05, fake.release).start()

    async def main() -> list[Any]:
        return [await handles[0], *await asyncio.gather(handles[1], handles[0])]  # type: ignore[arg-type]

    first, second, again = asyncio.run(main())
    np.testing.assert_array_equal(first, V * 2)
    np.testing.assert_array_equal(second, (V + 1) * 2)
    np.testing.assert_array_equal(again, first)


def test_await_raises_what_result_raises(fake: FakeLab, double: Any) -> None:
    fake.failing = "double"
    h = double(V)

    async def main() -> None:
        await h

    with pytest.raises(pw.PathwaysError, match="boom"):
        asyncio.run(main())


@pytest.mark.parametrize("wait", [lambda h: h.result(), jax.block_until_ready, jax.device_get])
def test_interrupting_a_wait_returns_at_once_and_cancels(
    fake: FakeLab, double: Any, wait: Callable[[Any], Any]
) -> None:
    """Also the runs that it waits for; the lab goes on."""
    fake.held = True
    first = double(V)
    second = double(first)
    other = double(V + 1)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    started = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        wait(second)
    assert time.monotonic() - started < 30
    fake.settle()
    runs = {m["outputs"][0]: m["run"] for m in fake.of("submit")}
    cancelled = {run for m in fake.of("cancel") for run in m["runs"]}
    assert cancelled == {runs[first.buffer_id], runs[second.buffer_id]}
    for handle in (first, second):
        with pytest.raises(pw.PathwaysError, match="cancelled"):
            handle.result(timeout=10)
    fake.release()
    np.testing.assert_array_equal(other.result(), (V + 1) * 2)


# --- failing -----------------------------------------------------------------------------


def test_a_failed_run_is_told_with_the_users_line(fake: FakeLab, double: Any) -> None:
    fake.failing = "double"
    h = double(V)  # the call
    for use in (h.result, h.block_until_ready, lambda: float(h[0]), lambda: double(h)):
        with pytest.raises(pw.PathwaysError, match="boom") as caught:
            use()
        assert caught.value.failure.line.text == "h = double(V)  # the call"
    assert h.state == "failed"
    assert "boom" in repr(h)
    fake.failing = ""
    np.testing.assert_array_equal(double(V).result(), V * 2)


def test_a_value_that_was_there_may_be_lost(fake: FakeLab, double: Any) -> None:
    h = double(V)
    h.block_until_ready()
    failure = Failure("lost", "host island0/host0 died")
    fake.say("resolved", {"resolved": [[[h.buffer_id], pack(failure)]]})
    fake.settle()
    with pytest.raises(pw.PathwaysError, match="host island0/host0 died"):
        h.result()


def held(fake: FakeLab, double: Any) -> tuple[pw.Handle, int]:
    """A result that nobody has resolved, and its run."""
    fake.held = True
    h = double(V)
    fake.settle()
    (submitted,) = fake.of("submit")
    return h, submitted["run"]


def test_results_that_nobody_resolved_fail_with_their_run(fake: FakeLab, double: Any) -> None:
    h, run = held(fake, double)
    failure = Failure("cancelled", "the run was cut")
    fake.say("run-ended", {"run": run, "resolved": [], "failure": pack(failure)})
    with pytest.raises(pw.PathwaysError, match="the run was cut"):
        h.result(timeout=20)


def test_a_refused_run_fails_its_results(fake: FakeLab, double: Any) -> None:
    h, run = held(fake, double)
    failure = Failure("memory", "it needs 9 GB a device, and there are 2")
    fake.say("refused", {"subject": f"run {run}", "failure": pack(failure)})
    with pytest.raises(pw.PathwaysError, match="9 GB"):
        h.result(timeout=10)


def test_when_the_lab_ends_every_handle_says_so(fake: FakeLab, double: Any) -> None:
    ready, pending = double(V).block_until_ready(), None
    fake.held = True
    pending = double(V)
    fake.settle()
    fake.say("closing", {"reason": "it failed", "remedy": "report it", "details": "a traceback"})
    for handle in (pending, ready):
        with pytest.raises(pw.PathwaysError, match=r"gone: it failed\n  remedy: report it") as told:
            handle.result(timeout=10)
        assert told.value.failure.details == "a traceback"
    with pytest.raises(pw.PathwaysError, match="the lab is gone"):
        double(V)


def test_released_slices_are_said(fake: FakeLab, double: Any) -> None:
    with fake.slice(2) as on:
        h = pw.device_put(V, on)
    with pytest.raises(pw.PathwaysError, match="was released"):
        h + 1
    fake.settle()
    assert fake.of("release-slice")[0]["slice"] == on.id


def test_a_released_slice_keeps_nothing_of_its_lab(fake: FakeLab) -> None:
    """JAX keeps meshes, and so the slices that they are made of."""
    on = fake.slice(2)
    assert on.owner is fake
    on.release()
    on.release()
    assert on.owner is None
    fake.settle()
    assert (fake.count("release-slice"), on.state) == (1, "released")
    with pytest.raises(pw.PathwaysError, match="was released"):
        pw.device_put(np.zeros(2), on)


# --- freeing --------------------------------------------------------------------------------


def test_dropping_the_last_reference_frees_it(fake: FakeLab, double: Any) -> None:
    h = double(V).block_until_ready()
    identity = h.buffer_id
    alias = h
    del h
    fake.settle()
    assert identity in fake.arrays
    del alias
    gc.collect()
    until(lambda: identity not in fake.arrays)


def test_finalizers_only_enqueue(fake: FakeLab, double: Any, monkeypatch: Any) -> None:
    """Nothing is sent in the thread, and at the time, in which a handle dies."""
    sent: list[tuple[str, str]] = []
    real = fake.connection.link.forward

    def forward(letter: Letter) -> int:
        sent.append((letter.op, threading.current_thread().name))
        return real(letter)

    monkeypatch.setattr(fake.connection.link, "forward", forward)
    cycle: list[Any] = [double(V).block_until_ready()]
    cycle.append(cycle)
    sent.clear()
    del cycle
    gc.collect()
    mine = threading.current_thread().name
    assert [entry for entry in sent if entry[1] == mine] == []
    until(lambda: ("drop", "pathways-kernel") in sent)


def test_drops_travel_with_the_next_message(fake: FakeLab, double: Any) -> None:
    def call() -> Any:
        return double(V).block_until_ready()

    first = call()
    identity = first.buffer_id
    del first
    call()
    until(lambda: identity in [b for m in fake.of("submit") for b in m.get("dropped", ())])


def test_delete_frees_now(fake: FakeLab, double: Any) -> None:
    h = double(V)
    h.delete()
    assert h.is_deleted()
    with pytest.raises(pw.PathwaysError, match="was deleted"):
        h.result()
    h.delete()


def test_who_waits_for_a_handle_hears_that_it_was_deleted(fake: FakeLab, double: Any) -> None:
    """Also one whose buffer the lab never speaks of again."""
    fake.held = True
    said: list[str] = []

    def wait(look: Callable[[], Any]) -> None:
        with pytest.raises(pw.PathwaysError) as caught:
            look()
        said.append(str(caught.value))

    h = double(V)

    async def awaited() -> Any:
        return await h

    looks = (h.block_until_ready, h.result, lambda: asyncio.run(awaited()))
    threads = [threading.Thread(target=wait, args=(look,)) for look in looks]
    for thread in threads:
        thread.start()
    until(lambda: fake.connection.board._sleepers and h._buffer._callbacks)
    h.delete()
    for thread in threads:
        thread.join(30)
    assert len(said) == 3
    assert all("was deleted" in one for one in said)
    wait(h.block_until_ready)


def test_a_thousand_runs_leave_nothing_behind(fake: FakeLab, double: Any) -> None:
    h = double(V)
    for _ in range(1000):
        h = double(h)
    h.block_until_ready()

    def settled() -> bool:
        fake.settle()
        few = len(fake.connection._buffers) <= 2 and len(fake.arrays) <= 2
        return few and not fake.connection._runs and not fake.session.data._fetches

    until(settled)


# --- fetching -------------------------------------------------------------------------------


def test_a_fetch_asks_as_few_devices_as_it_can(fake: FakeLab) -> None:
    on = fake.slice(2, 4, axes=("a", "b"))
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    for spec, hosts in ((P(), 1), (P("a"), 2), (P("b"), 2), (P("a", "b"), 4), (P(("a", "b")), 4)):
        h = pw.device_put(x, on.sharding(spec)).block_until_ready()
        before = fake.connection.traffic.fetches
        np.testing.assert_array_equal(h.result(), x)
        assert fake.connection.traffic.fetches - before == hosts, spec


def test_small_values_are_kept_and_large_ones_are_not(fake: FakeLab, double: Any) -> None:
    small, large = double(V), double(np.ones(1 << 16, np.float32))
    for handle, more in ((small, 0), (large, 1)):
        handle.result()
        before = fake.connection.traffic.fetches
        handle.result()
        assert (fake.connection.traffic.fetches > before) == bool(more)


def test_device_get_starts_all_fetches_before_it_waits(fake: FakeLab, double: Any) -> None:
    fake.held = True
    handles = [double(V + i) for i in range(3)]
    timer = threading.Timer(0.2, fake.release)
    timer.start()
    jax.device_get(handles)
    assert fake.connection.traffic.fetches == 3 * 2


# --- operators --------------------------------------------------------------------------------

BINARY = "add sub mul truediv floordiv mod pow eq ne lt le gt ge".split()  # noqa: SIM905


@pytest.mark.parametrize("name", BINARY)
def test_operators_are_programs_of_one_node(fake: FakeLab, double: Any, name: str) -> None:
    op = getattr(operator, name)
    h = double(V)
    for other in (3, 2.5, np.full(8, 2, np.float32), h):
        plain = np.asarray(h) if isinstance(other, pw.Handle) else other
        np.testing.assert_allclose(np.asarray(op(h, other)), op(V * 2, plain), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(op(3.0, h)), op(np.float32(3), V * 2), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(op(np.ones(8), h)), op(np.ones(8), V * 2), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int4", "int2", "bfloat16"])
def test_powers_of_whole_numbers_are_those_of_jax(fake: FakeLab, dtype: str) -> None:
    x = jnp.array([-2, 1, 0, 2], dtype)
    h = pw.device_put(x, fake.slice(4))
    for power in (2, np.int8(3), True):
        made, plain = h**power, x**power
        assert (made.dtype, made.weak_type) == (plain.dtype, plain.weak_type)
        np.testing.assert_array_equal(made.result().astype(float), np.asarray(plain, float))
    if dtype != "bfloat16":
        with pytest.raises(pw.PathwaysError, match="negative powers"):
            h**-1


def test_numbers_in_an_index_are_no_code_of_their_own(fake: FakeLab) -> None:
    x = np.arange(24).reshape(4, 3, 2)
    h = pw.device_put(x, fake.slice(4))
    assert (h[0].shape, h[0, 0].shape, h[1, :1].shape) == ((3, 2), (2,), (1, 2))
    before = stats.work.exported
    for n, row in enumerate(h):
        np.testing.assert_array_equal(row.result(), x[n])
        np.testing.assert_array_equal(h[-n - 1, np.int8(2)].result(), x[-n - 1, 2])
        np.testing.assert_array_equal(h[n, :1].result(), x[n, :1])
    assert stats.work.exported == before
    with pytest.raises(pw.PathwaysError, match="does not fit into int32"):
        h[2**31]


def test_indexing_methods_and_properties(fake: FakeLab, double: Any) -> None:
    h = double(V.reshape(8, 1))
    x = V.reshape(8, 1) * 2
    rows = np.array([1, 3])
    checks: list[tuple[Any, Any]] = [
        (h[2], x[2]), (h[1:5:2, 0], x[1:5:2, 0]), (h[..., None], x[..., None]), (h[rows], x[rows]),
        (h[[1, 2]], x[[1, 2]]), (h[pw.device_put(rows, h.slice)], x[rows]), (h.T, x.T),
        (h.sum(), x.sum()), (h.mean(axis=0), x.mean(axis=0)), (h.reshape(2, 4), x.reshape(2, 4)),
        (h.reshape((4, -1)), x.reshape(4, -1)), (h.max(0), x.max(0)), (-h, -x), (abs(-h), x),
        (h.astype(np.int32), x.astype(np.int32)), (h.dot(np.ones(1, np.float32)), x[:, 0]),
        (np.sum(h), x.sum()), (h @ np.ones((1, 2), np.float32), x @ np.ones((1, 2))),
    ]  # fmt: skip
    for got, want in checks:
        np.testing.assert_allclose(np.asarray(got), want)
    assert h[0].shape == (1,)
    assert (h.item(3), h.itemsize) == (x.item(3), 4)
    assert not hasattr(h, "addressable_shards")
    with pytest.raises(AttributeError, match=r"has no 'nonzero': handle\.result\(\)"):
        h.nonzero()
    with pytest.raises(TypeError, match=r"handle\.at\[index\]\.set\(value\)"):
        h[0] = 1
    assert (h == "no") is False
    with pytest.raises(TypeError):
        h + "no"


MASKS: list[Callable[[Any], Any]] = [
    lambda x: x[x > 5], lambda x: x[ROWS], lambda x: x[..., x[0] > 2], lambda x: x[1:, ROWS[:3]],
    lambda x: x[:, None, x[1] < 5], lambda x: x[(x > 3) & (x < 7)], lambda x: x[True],
]  # fmt: skip
UPDATES: list[Callable[[Any], Any]] = [
    lambda x: x.at[0].set(7), lambda x: x.at[:, 1].add(2.5), lambda x: x.at[1, 2].multiply(3),
    lambda x: x.at[[0, 1], [2, 0]].set(np.array([7, 8])), lambda x: x.at[x > 5].set(0),
    lambda x: x.at[ROWS].set(x[2:]), lambda x: x.at[9].set(1, mode="drop"), lambda x: x.copy(),
    lambda x: x.at[9].get(mode="fill", fill_value=-1), lambda x: x.at[0].apply(jnp.sin),
    lambda x: x.at[-1].subtract(values=x[0]), lambda x: x.at[x > 8].max(np.array([9, 30, 4])),
    lambda x: x.view("int32"),
]  # fmt: skip
ROWS = np.array([True, False, True, False])


@pytest.mark.parametrize("use", [*MASKS, *UPDATES])
def test_masks_and_updates_are_those_of_jax(fake: FakeLab, use: Callable[[Any], Any]) -> None:
    x = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
    made, plain = use(pw.device_put(x, fake.slice(4))), use(x)
    assert (made.dtype, made.shape) == (plain.dtype, plain.shape)
    np.testing.assert_array_equal(made.result(), plain)


def test_a_mask_fits_and_numbers_are_no_code_of_their_own(fake: FakeLab) -> None:
    h = pw.device_put(np.zeros((4, 3), np.float32), fake.slice(4))
    with pytest.raises(IndexError, match=r"a mask of shape \(4,\) .* axes of sizes \(3,\)"):
        h[:, ROWS]
    with pytest.raises(IndexError, match=r"axes of sizes \(3,\)"):
        h.at[..., ROWS].set(0)
    before = stats.work.exported
    for n in range(3):
        h = h.at[n, n].set(n + 0.5)
    assert stats.work.exported == before + 1
    np.testing.assert_array_equal(h.result()[:3].diagonal(), [0.5, 1.5, 2.5])
    inside = pw.program(lambda: h.at[3].set(1)[3])()
    np.testing.assert_array_equal(inside.result(), np.ones(3))


def test_methods_take_arrays_handles_and_lists_wherever_jax_does(
    fake: FakeLab, double: Any
) -> None:
    h, x = double(V), V * 2
    pairs = [
        (h.sum(where=x > 5), x.sum(where=x > 5)), (h.sum(where=h > 5), x.sum(where=x > 5)),
        (h.clip(min=V, max=9), x.clip(V, 9)), (h.take(indices=np.array([1, 0])), x[[1, 0]]),
        (h.take([1, 2]), x[[1, 2]]), (h.dot(b=h), x.dot(x)), (h.searchsorted([3, 7]), [1, 3]),
        (h.reshape(2, 4).sum(axis=[0, 1], keepdims=True), [[72]]), (h.argsort(), np.arange(8)),
        (h.reshape([2, 4]).trace(offset=1), 2 * (2 + 7)), (h.reshape(2, 4).diagonal(), [2, 12]),
        (h.conjugate(), x), (h.ptp(), 14), (h.argpartition(3), x.argpartition(3)),
        (round(h / 3, 1), (x / 3).round(1)), (divmod(h, 3)[1], x % 3), (divmod(7, h)[0], 7 // x),
    ]  # fmt: skip
    for made, plain in pairs:
        np.testing.assert_allclose(made.result(), plain, rtol=1e-6)
    assert [round(h[0] / 3).dtype, round(h[0] / 3, 1).dtype] == ["int32", "float32"]


def test_a_scalar_is_not_iterated_over(fake: FakeLab, double: Any) -> None:
    with pytest.raises(TypeError, match="iteration over a scalar handle"):
        iter(double(V)[0])


def test_operators_with_handles_elsewhere_are_refused(fake: FakeLab, double: Any) -> None:
    there = pw.device_put(V, fake.slice(2))
    with pytest.raises(pw.PathwaysError, match="are on slices") as caught:
        double(V) + there
    assert "on=slice" in caught.value.failure.remedy


# --- odds and ends -------------------------------------------------------------------------------


def test_copies_and_pickles(fake: FakeLab, double: Any) -> None:
    h = double(V)
    assert copy.copy(h) is h
    assert copy.deepcopy({"h": h})["h"] is h
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(h)
    assert len({h, h}) == 1, "a set or a task group may hold handles"


def test_handles_of_another_lab(fake: FakeLab, double: Any) -> None:
    with FakeLab() as other:
        h = pw.device_put(V, other.slice(4))
        with pytest.raises(pw.PathwaysError, match="belongs to another lab"):
            double(h)


def test_values_of_two_labs_do_not_meet_in_a_program(fake: FakeLab, double: Any) -> None:
    with FakeLab() as other:
        theirs = pw.device_put(V, other.slice(4))
        calls = [
            pw.program(lambda: double(theirs)),
            pw.program(lambda: double(jnp.ones(8)) + double(theirs)),
            pw.program(lambda: (theirs + 1, double(jnp.ones(8)))),
        ]
        for call in calls:
            with pytest.raises(pw.PathwaysError, match="belongs to another lab") as caught:
                call()
            assert f"{fake}" in str(caught.value)
            assert f"{other}" in str(caught.value)
            assert caught.value.failure.line.text
        other.settle()
        assert not fake.count("submit") + other.count("submit")


@pytest.mark.parametrize("way", ["call", "program", "cell"])
def test_each_lab_runs_what_its_own_values_ask_for(fake: FakeLab, way: str) -> None:
    add = pw.jit(lambda x: x + 1)
    program = pw.program(lambda x: add(x))
    code = compile("y = f(x)", "<cell>", "exec")
    cell = CellProgram(lambda names: exec(code, names))

    def run(x: Any) -> Any:
        if way == "cell":
            return cell({"f": add, "x": x})["y"]
        return add(x) if way == "call" else program(x)

    with FakeLab() as other:
        for lab in (fake, other):
            on = lab.slice(4)  # each lab numbers its own slices
            h = run(pw.device_put(V, on))
            assert h.slice is on
            assert np.array_equal(h.result(timeout=10), V + 1)


@pytest.fixture
def said(fake: FakeLab) -> Callable[[str], None]:
    def say(text: str) -> None:
        fake.say("output", {"host": "island0/host1", "run": 1, "device": 3, "text": text})

    return say


def test_what_hosts_print_is_shown_by_the_thread_that_waits(
    fake: FakeLab, double: Any, said: Callable[[str], None], capsys: Any
) -> None:
    double(V)
    fake.settle()
    said("one\ntwo\n")
    fake.settle()
    assert capsys.readouterr().out == "", "nothing is printed from a background thread"
    double(V).result()
    assert capsys.readouterr().out == (
        "[island0/host1 device 3] one\n[island0/host1 device 3] two\n"
    )


def test_a_front_end_takes_the_output(
    fake: FakeLab, double: Any, said: Callable[[str], None], capsys: Any
) -> None:
    taken: list[Any] = []
    fake.session.show_output = lambda output: not taken.append(output)
    double(V)
    fake.settle()
    said("hello")
    double(V).result()
    fake.settle()
    assert [t["text"] for t in taken] == ["hello"]
    assert capsys.readouterr().out == ""


def test_uploads_of_arrays_that_change_later(fake: FakeLab) -> None:
    """The value is that of the moment of the call."""
    x = np.zeros(1 << 20, np.float32)
    h = pw.device_put(x, fake.slice(2))
    x += 1
    assert float(h.sum()) == 0
