"""Collectives between islands: which there are in a compiled function, and how long they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime.devices import CpuRuntime
from pathways_lab.runtime.fault_injection import Troubles
from pathways_lab.runtime.islands import dcn_collectives
from pathways_lab.runtime.islands.dcn_collectives import Crossing, crossing

ISLANDS = ("a", "a", "b", "b")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%p = f32[4,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, x", (1, 64)),
        ("%p = f32[4,4]{1,0} all-reduce(%x), replica_groups={{0,2},{1,3}}, x", (1, 128)),
        ("%p = f32[4,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, x", (0, 0)),
        ("%p = bf16[8]{0} all-gather(%x), replica_groups=[2,2]<=[4], x", (0, 0)),
        ("%p = bf16[8]{0} all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), x", (1, 32)),
        ("%p = s8[8]{0} all-reduce-start(%x), replica_groups=mesh['i'=2,'x'=2] {'x'}, x", (0, 0)),
        ("%p = s8[8]{0} all-reduce-start(%x), replica_groups=mesh['i'=2,'x'=2] {'i'}, x", (1, 16)),
        ("%p = s8[8]{0} all-reduce(%x), replica_groups={}, x", (1, 8)),
        ("%p = s8[8]{0} all-reduce(%x), replica_groups=something new, x", (1, 8)),
        ("%p = f32[4]{0} reduce-scatter(%x), replica_groups={{0,2},{1,3}}, x", (1, 64)),
        ("%p = (f32[4]{0}, u4[4]{0}) all-to-all(%x, %y), replica_groups={{0,1,2,3}}, x", (1, 20)),
        ("%p = pred[4]{0} collective-permute(%x), source_target_pairs={{0,2},{2,0}}", (1, 4)),
        ("%p = pred[4]{0} collective-permute(%x), source_target_pairs={{0,1},{2,3}}", (0, 0)),
        ("%e = f32[4]{0} get-tuple-element(%all-to-all), index=0", (0, 0)),
    ],
)
def test_what_crosses_is_read_from_a_compiled_function(line: str, found: tuple[int, int]) -> None:
    assert crossing(f"HloModule m\n  {line}\n", ISLANDS, (0, 1)) == found


def test_the_text_of_this_jax_is_understood() -> None:
    """Sums over one axis or the other of a mesh, written by hand and by the partitioner."""
    owned = tuple(("a/h", n) for n in range(4))
    place = CpuRuntime("a/h", 4).open(SliceBinding(1, "k", "a", (4,), ("x",), owned, "cpu"))
    mesh = Mesh(np.array(place.devices).reshape(2, 2), ("i", "x"))
    cut = NamedSharding(mesh, P("i", "x"))
    kind = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=cut)

    def text(function: Any, out: P) -> str:
        return str(
            jax.jit(function, out_shardings=NamedSharding(mesh, out))
            .lower(kind)
            .compile()
            .as_text()
        )

    for axes, found in (("i", (1, 2 * 64)), ("x", (0, 0))):
        out = P(*(None if axis == axes else axis for axis in ("i", "x")))
        by_hand = jax.shard_map(
            lambda v, axes=axes: jax.lax.psum(v, axes),
            mesh=mesh,
            in_specs=P("i", "x"),
            out_specs=out,
        )
        assert crossing(text(by_hand, out), ISLANDS, (0, 1)) == found
    for dimension, out, found in ((0, P("x"), (1, 2 * 16)), (1, P("i"), (0, 0))):
        assert crossing(text(lambda v, d=dimension: v.sum(d), out), ISLANDS, (0, 1)) == found


def test_devices_are_held_while_the_delay_of_that_name_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [0.0], []
    troubles = Troubles(SimpleNamespace(trouble=None), lambda: now[0])  # type: ignore[arg-type]
    monkeypatch.setattr(dcn_collectives, "_lateness", lambda *of: troubles.lateness("dcn", *of))
    monkeypatch.setattr(dcn_collectives.time, "sleep", slept.append)
    devices = (("a/h", 0), ("a/h", 1), ("b/h", 0), ("b/h", 1))
    binding = SliceBinding(1, "k", "a", (4,), ("x",), devices, "cpu", elsewhere=(("b/h", "b"),))
    place: Any = SimpleNamespace(binding=binding, numbers=(0, 1))
    everywhere = "= f32[4]{0} all-reduce(%x), replica_groups={{0,1,2,3}},"

    def call(text: str) -> None:
        found = dcn_collectives.of_place(text, place)
        assert dcn_collectives.held(lambda v: [v + 1], found, binding.home)(1) == [2]

    call(everywhere)
    assert slept == []
    far = {
        "kind": "delay",
        "name": "dcn",
        "peers": ["b/h"],
        "lasts": 5.0,
        "seconds": 0.5,
        "rate": 32.0,
    }
    troubles.begin({**far, "name": ""})
    call(everywhere)
    assert slept == [], "other trouble of links is none of collectives"
    troubles.begin(far)
    call(everywhere)
    call("nothing")
    assert slept == [0.5 + 16 / 32.0]
    now[0] = 6.0
    call(everywhere)
    assert len(slept) == 1
    assert dcn_collectives.crossing("", ISLANDS, (0,)) == Crossing()
