"""Examples of everything public: the reference shows them, and tests run them.

They run in the order of this file, in one lab, which the last one closes; how they are
written is said in :mod:`tools.showing`.

Rule for maintainers: short, and what it says of a result it asserts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_lab as pw
from pathways_lab.timeline.records import Span
from tools.examples_of_training import dense
from tools.showing import PREFACE, all_examples, by_name, shows

__all__ = ["PREFACE", "all_examples", "by_name"]


# --- labs ---------------------------------------------------------------------------------


@shows("pw.start", "pw.Lab", "pw.current", "Lab.closed", "Lab.owner", "Lab.clients")
def starting(lab: pw.Lab) -> None:
    # lab = pw.start(islands=2, hosts_per_island=1, devices_per_host=2, name="ann")
    assert pw.current() is lab
    assert lab.clients == ("ann",)
    assert lab.owner
    assert not lab.closed


@shows("Lab.islands", "Lab.devices")
def machine_of(lab: pw.Lab) -> None:
    assert [island.name for island in lab.islands] == ["island0", "island1"]
    assert len(lab.devices()) == 4


@shows(
    "Lab.slice", "pw.Slice", "Slice.axis_sizes", "Slice.mesh", "Slice.hosts",
    "Slice.island", "Slice.islands", "Slice.state",
)  # fmt: skip
def slicing(lab: pw.Lab) -> None:
    grid = lab.slice((1, 2), ("data", "model"), island="island0")
    assert grid.axis_sizes == (("data", 1), ("model", 2))
    assert grid.mesh.axis_names == ("data", "model")  # a jax.sharding.Mesh
    assert (grid.island, grid.state) == ("island0", "bound")
    assert set(grid.hosts) == {"island0/host0"}  # one for each device
    assert lab.slice((2, 1), ("island", "x"), islands=2).islands == ("island0", "island1")


@shows("Slice.sharding")
def cutting(s: pw.Slice) -> None:
    cut = pw.device_put(np.ones((4, 6), np.float32), s.sharding(P(None, "x")))
    assert cut.sharding.shard_shape(cut.shape) == (4, 3)


@shows("Lab.slice_at", "Slice.release")
def chosen_devices(lab: pw.Lab) -> None:
    with lab.slice_at([lab.devices()[-1]]) as last:  # or last.release()
        assert last.hosts == ("island1/host0",)
    assert last.state == "released"


@shows("pw.make_virtual_device_set", "Slice.tpus", "pw.pmap")
def mapping(lab: pw.Lab) -> None:
    chips = pw.make_virtual_device_set(lab).add_slice(tpu_devices=2).tpus  # the paper's spelling
    total = pw.pmap(lambda row: jax.lax.psum(row, "i"), axis_name="i", devices=chips)
    np.testing.assert_array_equal(total(np.arange(2.0)), [1.0, 1.0])


@shows("pw.patched")
def patching(s: pw.Slice) -> None:
    with pw.patched():  # in notebooks %load_ext pathways_lab does it
        double = jax.jit(lambda a: 2 * a, in_shardings=s.sharding(P("x")))
        out: Any = double(np.ones(4, np.float32))
    assert isinstance(out, pw.Handle)


@shows("pw.experts")
def experts(lab: pw.Lab) -> None:
    def route(x: Any, router: Any) -> Any:
        return jax.lax.top_k(jax.nn.softmax(x @ router), 1)[::-1]

    on = [lab.slice(1), lab.slice(1)]
    moe = pw.experts(lambda w, rows: jnp.tanh(rows @ w), on=on, route=route)
    eye, x = np.eye(4, dtype=np.float32), pw.device_put(np.ones((8, 4), np.float32), on[0])
    assert moe([eye, 2 * eye], x, eye[:, :2]).result().shape == (8, 4)


@shows("pw.cond", "pw.switch", "pw.until")
def deciding(s: pw.Slice, t: pw.Slice) -> None:
    grow = pw.jit(lambda a: a * 2, on=s)
    shrink = pw.jit(lambda a: a - 1, on=t)  # on the other island

    @pw.program
    def steps(a: Any) -> Any:
        a = pw.cond(a.sum() > 9, grow, lambda v: grow(shrink(v)), grow(a))
        a = pw.switch(a.max() % 2, [grow, lambda v: grow(shrink(v))], a)
        return pw.until(lambda v: v.max() > 50, lambda v: grow(shrink(v)), a, at_most=5)

    assert steps(np.full(4, 8.0, np.float32)).result()[0] == 64.0


# --- values -------------------------------------------------------------------------------


@shows("pw.device_put")
def putting(s: pw.Slice, t: pw.Slice) -> None:
    tree = {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)}
    there = pw.device_put(tree, {"w": s.sharding(P("x")), "b": s})
    moved = pw.device_put(there, t)  # to the other island, without this kernel
    assert moved["w"].slice is t


@shows(
    "pw.Handle", "Handle.result", "Handle.state", "Handle.is_ready", "Handle.block_until_ready",
    "Handle.failure",
)  # fmt: skip
def waiting(s: pw.Slice, x: Any) -> None:
    out = pw.jit(lambda a: a + 1, on=s)(x)  # at once; the value comes later
    out.block_until_ready()
    assert out.is_ready()
    assert out.state == "ready"
    assert out.failure is None
    np.testing.assert_array_equal(out.result(timeout=60), np.arange(1, 9))  # or await out


@shows(
    "Handle.type", "Handle.sharding", "Handle.layout", "Handle.slice", "Handle.nbytes",
    "Handle.itemsize", "Handle.shape", "Handle.dtype", "Handle.ndim", "Handle.size",
    "Handle.weak_type",
)  # fmt: skip
def looking_at_a_handle(s: pw.Slice, x: Any) -> None:
    assert (str(x.type), x.shape, x.dtype, x.weak_type) == ("float32[8]", (8,), np.float32, False)
    assert (x.ndim, x.size, x.itemsize, x.nbytes) == (1, 8, 4, 32)
    assert x.slice is s
    assert x.sharding.spec == P("x")
    assert str(x.layout) == "P(x)"


@shows("Handle.item", "Handle.tolist", "Handle.copy_to_host_async")
def fetching(x: Any) -> None:
    x.copy_to_host_async()  # begin to fetch; the next line finds it under way
    assert x.item(3) == 3.0
    assert x.tolist()[:2] == [0.0, 1.0]


@shows(
    "Handle.all", "Handle.any", "Handle.argmax", "Handle.argmin", "Handle.argpartition",
    "Handle.argsort", "Handle.astype", "Handle.at", "Handle.clip", "Handle.conj",
    "Handle.conjugate", "Handle.copy", "Handle.cumprod", "Handle.cumsum", "Handle.diagonal",
    "Handle.dot", "Handle.flatten", "Handle.max", "Handle.mean", "Handle.min", "Handle.prod",
    "Handle.ptp", "Handle.ravel", "Handle.repeat", "Handle.reshape", "Handle.round",
    "Handle.searchsorted", "Handle.sort", "Handle.squeeze", "Handle.std", "Handle.sum",
    "Handle.swapaxes", "Handle.take", "Handle.trace", "Handle.transpose", "Handle.var",
    "Handle.view",
)  # fmt: skip
def computing_with_handles(x: Any) -> None:
    # Operators and methods of arrays run where the handle is, and give handles.
    y = (2 * x.reshape(2, 4)).sum(axis=0)
    np.testing.assert_array_equal(y, [8, 12, 16, 20])
    assert float(x.at[0].set(9).max()) == 9.0


@shows("Handle.delete", "Handle.is_deleted")
def deleting(s: pw.Slice) -> None:
    large = pw.device_put(np.zeros(1000, np.float32), s)
    large.delete()  # now; else when the last reference goes
    assert large.is_deleted()


# --- functions and programs ---------------------------------------------------------------


@shows("pw.jit")
def compiling(s: pw.Slice, x: Any) -> None:
    scale = pw.jit(lambda a, by: a * by, on=s, in_shardings=(P("x"), None), out_shardings=P("x"))
    np.testing.assert_array_equal(scale(x, 3), 3 * np.arange(8))


@shows(
    "pw.program", "ProgramFunction.capture", "ProgramFunction.ir", "ProgramFunction.mlir",
    "CapturedProgram.ir", "CapturedProgram.mlir", "CapturedProgram.run",
    "CapturedProgram.program", "CapturedProgram.bindings", "CapturedProgram.held",
    "CapturedProgram.released",
)  # fmt: skip
def programming(s: pw.Slice, t: pw.Slice, x: Any) -> None:
    embed = pw.jit(lambda a: a + 1, on=s, name="embed")
    head = pw.jit(lambda a: a.sum(), on=t, name="head")

    @pw.program
    def step(a: Any) -> Any:
        return head(embed(a))  # two gangs on two islands, and a transfer between them

    assert float(step(x)) == 36.0  # one message
    captured = step.capture(x)  # without running it
    assert "embed" in captured.ir()
    assert "mpmd" in step.mlir(x)
    assert len(captured.program.nodes) == 3 - 1
    assert float(captured.run([x])) == 36.0
    assert not captured.released


@shows("pw.possible_deadlock")
def foreseeing(s: pw.Slice, x: Any) -> None:
    @pw.program
    def alone(a: Any) -> Any:
        return pw.jit(lambda v: v * 2, on=s)(a)

    alone(x)
    assert pw.possible_deadlock(alone) is None


@shows("pw.emulated", "pw.pipeline.held")
def emulating(s: pw.Slice, x: Any) -> None:
    slow = pw.jit(lambda a: pw.emulated(ms=5)(a) + 1, on=s)  # CPU devices are held for 5 ms
    slow(x).block_until_ready()
    layer = pw.pipeline.held(dense, forward=1.0)  # type: ignore[attr-defined]
    assert callable(layer)


@shows("pw.LargeConstantWarning", "pw.PathwaysError", "pw.Failure", "Failure.where")
def failing(s: pw.Slice, x: Any) -> None:
    gone = pw.jit(lambda a: a, on=s, donate_argnums=0)
    copy = x + 0
    gone(copy)
    try:
        copy.result()
    except pw.PathwaysError as raised:
        failure = raised.failure
    assert failure.kind == "refused"
    assert "donated" in failure.message
    assert failure.where.startswith("node")
    assert failure.remedy


@shows("Handle.cancel", "Lab.cancel", "pw.Cancelled")
def cancelling(lab: pw.Lab, s: pw.Slice, x: Any) -> None:
    double = pw.jit(lambda a: 2 * a, on=s)
    out = double(x)
    if out.cancel():  # it had not begun
        assert out.failure.kind == "cancelled"
    outs = [double(x) for _ in range(3)]
    done = lab.cancel(outs)  # without arguments: all runs of this client
    assert done.cancelled + done.begun + done.going <= 3


# --- checkpoints --------------------------------------------------------------------------


@shows("pw.save", "pw.restore", "pw.Saving", "Saving.wait", "Saving.done", "Saving.finish")
def saving(s: pw.Slice, t: pw.Slice, x: Any, folder: Path) -> None:
    saving = pw.save(folder / "100", {"x": x}, wait=False)  # each host writes its own part
    saving.wait()
    assert saving.done
    again = pw.restore(folder / "100", {"x": x})  # to where it was
    there = pw.restore(folder / "100", {"x": x}, on=t)  # or elsewhere
    np.testing.assert_array_equal(again["x"], there["x"])
    assert list(pw.restore(folder / "100")) == ["x"]  # NumPy, without a lab; Orbax reads it too


# --- several clients ----------------------------------------------------------------------


@shows(
    "Lab.invite", "pw.connect", "Lab.publish", "Lab.published", "Lab.take", "Lab.unpublish",
    "Lab.quota", "Lab.accounts",
)  # fmt: skip
def sharing(lab: pw.Lab, x: Any, folder: Path) -> None:
    lab.publish("weights", x)
    lab.quota("bob", devices=2, bytes="1 GB")
    lab.invite(folder / "lab.json")
    with pw.connect(folder / "lab.json", name="bob") as bobs:  # in another notebook
        assert bobs.published == {"weights": "ann"}
        taken = bobs.take("weights")
        np.testing.assert_array_equal(taken, np.arange(8))
        mine = pw.jit(lambda a: a * 2, on=bobs.slice(1))
        assert float(mine(taken).sum()) == 56.0
    lab.unpublish("weights")
    assert "bob" in lab.accounts().clients


@shows("Lab.trunk", "pw.Trunk", "Trunk.vjp")
def trunk(lab: pw.Lab, folder: Path) -> None:
    s = lab.slice(1)
    weights = pw.device_put(np.eye(4, dtype=np.float32), s)
    lab.trunk("model", lambda w, x, scale: x @ w * scale, weights, on=s)
    lab.invite(folder / "lab.json")
    with pw.connect(folder / "lab.json", name="dora") as doras:  # in another notebook
        model = doras.trunk("model")
        x, scale = np.ones((2, 4), np.float32), np.float32(3)
        y, pull = model.vjp(x, scale)  # in one gang with others who call at the same time
        assert float(y.result().sum()) == 24.0
        assert float(pull(y)) == 24.0 * 8 / 8  # for the adapter; the weights have no gradients


@shows("Lab.keep", "Lab.detach", "Lab.kept", "Lab.kept_as")
def kept(lab: pw.Lab, folder: Path) -> None:
    lab.invite(folder / "lab.json")  # or a lab of one's own: pw.start(keep="mine")
    with pw.connect(folder / "lab.json", name="cleo") as before:
        state = {"w": pw.device_put(np.arange(8.0, dtype=np.float32), before.slice(2))}
        before.keep(state=state)  # returns when it is there; the kernel may die from now on
        double = pw.jit(lambda w: 2 * w, on=before.slices[0])
        before.detach(state={"w": double(state["w"])})  # returns at once, and its run goes on
    with pw.connect(folder / "lab.json", name="cleo") as again:  # the next kernel
        np.testing.assert_array_equal(again.kept["state"]["w"], 2 * np.arange(8))
        again.unpublish("state")
    assert lab.kept_as == ""  # this one ends with its kernel


@shows("Lab.door")
def unchanged(lab: pw.Lab) -> None:
    program = "import jax; print(len(jax.devices()), jax.numpy.arange(3).sum())"
    with lab.door("script") as variables:  # for any script that only imports JAX
        command, there = [sys.executable, "-c", program], os.environ | variables
        said = subprocess.run(command, env=there, capture_output=True)
    assert said.stdout.split() == [b"4", b"3"]


@shows("Lab.open_door")
def in_this_process(lab: pw.Lab) -> None:
    before = jnp.arange(4.0)  # JAX may have been used before
    pair = lab.slice(2, "x")
    with lab.open_door() as door:
        assert jax.devices() == list(door.devices)
        x = jax.device_put(before, pair.sharding(jax.P("x")))
        handle = pw.device_put(before, pair)  # an array for JAX, too
        assert jax.jit(jnp.sum)(x * handle) == 14.0  # JAX's own, on the lab


@shows(
    "Lab.policy", "pw.FIFO", "pw.Priority", "pw.ProportionalShare", "pw.ShortestFirst",
    "pw.Policy", "pw.PolicyView", "pw.Candidate", "pw.Place", "pw.PlaceView", "FIFO.choose",
    "Policy.choose", "Priority.choose", "ProportionalShare.choose", "ShortestFirst.choose",
)  # fmt: skip
def choosing(lab: pw.Lab) -> None:
    class LongestWaiting:  # or one of your own
        def choose(self, view: pw.PolicyView) -> int:
            return max(view.candidates, key=lambda candidate: candidate.waited).run

        def place(self, view: pw.PlaceView) -> str:  # if it also says where slices lie
            return max(view.candidates, key=lambda place: place.devices).island

    lab.policy = pw.ProportionalShare({"ann": 1, "bob": 2})
    lab.policy = LongestWaiting()
    lab.policy = pw.FIFO()
    assert lab.policy == pw.FIFO()


@shows("Lab.priority", "pw.tagged")
def ranking(lab: pw.Lab, x: Any) -> None:
    lab.priority = 1  # of all that says nothing of its own
    with pw.tagged(priority=5, data={"deadline": 12.5}):  # policies see both
        urgent = x + 1
    lab.priority = 0
    assert float(urgent.max()) == 8.0


@shows("Lab.window")
def running_ahead(lab: pw.Lab) -> None:
    lab.window = 0.0  # nothing is granted ahead: whoever has priority goes next
    lab.window = 0.1
    assert lab.window == 0.1


@shows("Lab.suspend", "Lab.resume")
def making_room(lab: pw.Lab, x: Any) -> None:
    lab.suspend("ann")  # her values go to the hosts' memory; others have the devices
    assert x.slice.state == "suspended"
    lab.resume("ann")
    np.testing.assert_array_equal(x, np.arange(8))


# --- looking ------------------------------------------------------------------------------


@shows("Lab.memory")
def memory_of(lab: pw.Lab, x: Any) -> None:
    memory = lab.memory()  # prints as a table
    (found,) = [value for value in memory.values if value.name == "x"]
    assert found.nbytes == 32
    assert "a handle is held" in found.why
    assert len(lab.memory(most=1).values) == 1  # the largest; .others says how many more there are


@shows("Lab.check_nans")
def finding_nans(lab: pw.Lab, s: pw.Slice, x: Any) -> None:
    with lab.check_nans(infs=True):
        logs = pw.jit(jnp.log, on=s, name="log")(x)
    try:
        logs.result()
    except pw.PathwaysError as raised:
        told = raised.failure.message
    assert "log has made an infinity: element [0]" in told


@shows("Lab.stuck", "Lab.stacks", "Lab.on_stuck", "Lab.watchdog")
def standing_still(lab: pw.Lab) -> None:
    assert not lab.stuck()  # nobody waits
    assert not lab.stacks("island0/host0").lines  # nobody is in code of yours
    lab.on_stuck("report", after=30, silence=60)
    assert lab.watchdog.action == "report"


@shows("Lab.verify")
def verifying(lab: pw.Lab, s: pw.Slice, x: Any) -> None:
    double = pw.jit(lambda a: a * 2, on=s)
    found = lab.verify(double, x)  # there and on other devices; lab.verify(): everything
    assert found.ok
    assert not found.suspects


@shows("Lab.operations", "Operations")
def inside_of_a_gang(lab: pw.Lab, s: pw.Slice) -> None:
    product = pw.jit(lambda a: jnp.sin(a @ a), on=s)
    found = lab.operations(product, np.ones((64, 64), np.float32))  # runs it once
    assert found[0].seconds >= found[-1].seconds  # the longest first


@shows("Lab.chaos")
def breaking(lab: pw.Lab, x: Any) -> None:
    fault = lab.chaos.delay("island0", "island1", ms=1, seconds=0.2)
    assert "order and values are the same" in fault.expected.text  # said first
    with fault:
        (x + 1).block_until_ready()


@shows("Lab.stats", "Lab.submitted")
def counting(lab: pw.Lab, x: Any) -> None:
    before = lab.submitted
    (x * 3).block_until_ready()
    assert lab.submitted > before
    assert lab.stats().sent["submit"] == lab.submitted


@shows(
    "Timeline.records", "Timeline.recording", "Timeline.story", "Timeline.utilisation",
    "Timeline.waits", "Timeline.messages", "Timeline.programs", "Timeline.dropped",
    "Timeline.observe", "Timeline.planned", "Timeline.runs", "Timeline.capacity",
    "pw.compare_timelines",
)  # fmt: skip
def remembering(lab: pw.Lab, x: Any) -> None:
    ended = lab.timeline.observe(lambda records: None)  # told of everything new
    with lab.timeline.recording() as run:
        (x * 4).block_until_ready()
    ended()
    assert all(0 <= share <= 1 for share in lab.timeline.utilisation().values())
    assert lab.timeline.waits()  # by device: seconds by cause
    assert lab.timeline.messages()
    assert lab.timeline.dropped == 0  # of at most so many:
    lab.timeline.capacity = 300_000
    print(lab.timeline.runs)  # a table: submitted, granted, begun, ended
    assert lab.timeline.programs
    gangs = [r.run for r in lab.timeline.records if isinstance(r, Span) and r.kind == "gang"]
    for step in gangs[:1]:  # records come a moment after the end
        assert lab.timeline.story(step)
        lab.timeline.planned(step)  # in a cell: what an ideal machine does, beside what happened
    pw.compare_timelines({"one": run, "the same": run})


@shows(
    "Timeline.save", "Timeline.load", "pw.load", "Timeline.view", "Timeline.to_perfetto",
    "Timeline.to_dataframe",
)  # fmt: skip
def keeping(lab: pw.Lab, folder: Path) -> None:
    path = lab.timeline.save(folder / "run.npz")
    again = pw.load(path)  # without a lab
    assert again.records
    again.view("queues")  # a picture; replay=True: with scrubber and zoom
    lab.timeline.to_perfetto(folder / "run.json")  # ui.perfetto.dev opens it
    assert len(again.to_dataframe()) == len(again.records)


@shows("Lab.sql", "Timeline.sql", "QueryRows")
def asking(lab: pw.Lab) -> None:
    waits = lab.sql("select client, cause, sum(seconds) from waits group by all order by 3 desc")
    assert waits.columns[:2] == ("client", "cause")
    (runs,) = lab.timeline.sql("select count(*) from runs where client = 'ann'")
    assert runs[0] >= 1


@shows("Lab.view")
def watching(lab: pw.Lab) -> None:
    lab.view("islands", "queues", window=10)  # in a cell: live


@shows("Lab.dashboard", "Lab.dashboard_link")
def dashboards(lab: pw.Lab) -> None:
    page = lab.dashboard("memory")
    assert str(page).startswith(lab.dashboard_link)


@shows("Lab.dask_client")
def dask(lab: pw.Lab) -> None:
    with lab.dask_client() as client:
        assert client.submit(sum, [1, 2]).result() == 3


# --- ways to train ------------------------------------------------------------------------


@shows("Lab.feed")
def feeding(lab: pw.Lab, s: pw.Slice) -> None:
    def make(step: int) -> Any:
        return np.full(8, step, np.float32)  # on a worker beside the devices

    with lab.feed(make, s.sharding(P("x")), prefetch=2, steps=3, priority=1) as batches:
        assert [float(batch.sum()) for batch in batches] == [0.0, 8.0, 16.0]


@shows("Lab.elastic")
def surviving(lab: pw.Lab) -> None:
    def train(weight: Any, batch: Any) -> Any:
        return weight + batch.mean(), batch.sum()

    batches = [np.ones(4, np.float32)] * 3
    loop = lab.elastic(train, np.float32(0), batches, replicas=2, every=2, priority=-1)
    losses = [float(out) for step, state, out in loop]
    assert losses == [4.0, 4.0, 4.0]  # also when an island is lost meanwhile


@shows("Lab.lease", "Lab.multi_controller")
def without_controller(lab: pw.Lab) -> None:
    with lab.lease("island1"):
        place = lab.slice(2, island="island1")
        out = lab.multi_controller(
            lambda a: a + 1, np.zeros(4, np.float32), on=place, steps=10, data={"job": "loop"}
        )
        assert float(out.sum()) == 40.0


@shows("Lab.dcn")
def far_away(lab: pw.Lab, t: pw.Slice, x: Any) -> None:
    lab.dcn(latency=0.002, bandwidth=1e9)  # islands are that far from each other
    pw.device_put(x, t).block_until_ready()
    lab.dcn()


# --- machines that one does not have ------------------------------------------------------


@shows(
    "pw.Machine", "Machine.slice", "Machine.like", "Machine.devices", "Machine.hosts",
    "Machine.figures", "Machine.cost", "Machine.calibrated", "pw.simulate", "pw.Load",
    "Machine.of", "Machine.size", "pw.compare_policies", "pw.Costs", "pw.FunctionCost",
)  # fmt: skip
def simulating(lab: pw.Lab) -> None:
    assert pw.Machine.like(lab).devices == 4
    machine = pw.Machine(
        islands=1, hosts_per_island=16, devices_per_host=4, costs=pw.Costs(launch=1e-4),
        default=pw.FunctionCost(seconds=0.01),
    )  # fmt: skip
    assert (machine.devices, len(machine.hosts())) == (64, 16)
    assert machine.of("island0").devices == 64
    print(machine.size)
    where = machine.slice(64, "x")  # captured for as a lab's
    train = pw.program(pw.jit(lambda a: a * 2, on=where, name="train"))
    program = train.capture(jax.ShapeDtypeStruct((64, 8), "float32"))
    found = pw.simulate(program, machine, runs=5)
    assert 0.05 <= found.seconds < 1
    loads = [pw.Load(program, client=name, runs=3) for name in ("ann", "bob")]
    pw.compare_policies(loads, machine, [pw.FIFO(), pw.ProportionalShare({"bob": 2})])
    assert machine.cost("train").seconds == 0.01
    assert machine.calibrated({"launch": 2e-4}).costs.launch == 2e-4
    assert machine.figures()[0].source


# --- devices that come and go -------------------------------------------------------------


@shows("Lab.add_island", "Lab.remove_island", "Slice.rebind")
def coming_and_going(lab: pw.Lab) -> None:
    lab.add_island(devices_per_host=1)
    guest = lab.slice(1, island="island2")
    lab.remove_island("island2", anyway=True)
    assert guest.state == "lost"
    guest.rebind()  # the same slice on other devices: programs for it go on
    assert guest.state == "bound"


@shows("Lab.restart")
def restarting(lab: pw.Lab) -> None:
    (island,) = lab.restart("island1")  # new device processes; values there are lost
    assert island.name == "island1"


@shows("Lab.close")
def closing(lab: pw.Lab) -> None:
    lab.close()  # or: with pw.start() as lab
    assert lab.closed
