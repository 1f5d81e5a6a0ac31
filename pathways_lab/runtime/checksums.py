"""Checksums of what lies on devices, and a computation that says how well they compute.

Problem: a device that computes wrong, and says nothing, is found by having others do the same
and comparing every bit; the bytes should stay where they are.

How: bodies of compiled functions under ``shard_map``, without collectives: each device sums up
its own part, so a few words travel.  :func:`scan` exercises matrix products, sums, transcendental
functions, sorting, integers and copies on numbers that use all their bits.

Rule for maintainers: a checksum changes with any single word, and does not depend on the order
in which a device adds: unsigned integers only.  All is computed from an argument, or the compiler
would compute it, and not the device.

Paper: none; deterministic replay as other large systems do it (Gemini, section 5).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pathways_lab.runtime import array_files

UNITS = ("products", "sums", "functions", "sorting", "integers", "copies")
"""The units that :func:`scan` exercises, in the order of its checksums."""
WORDS = 2
"""Words of a checksum."""
_ODD = (np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B))


def of_parts(array: Any, number: Any, *, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Body of a compiled function: the checksum of each device's part of *array*, in their order.

    number: any; others make other checksums.
    """
    everywhere, anywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.shard_map(
        lambda part, number: checksum(part, number)[None],
        mesh=mesh,
        in_specs=(spec, anywhere),
        out_specs=everywhere,
        check_vma=False,
    )(array_files.plain(array), number)


def scan(number: Any, *, mesh: Mesh, size: int) -> Any:
    """Body of a compiled function: every device computes the same, alone; its checksums.

    number: of the round, which decides what is computed.  size: of the matrices.
    """
    everywhere = PartitionSpec(mesh.axis_names)

    def part(number: Any) -> Any:
        return jnp.concatenate([checksum(x, number) for x in _exercises(number, size)])[None]

    return jax.shard_map(
        part, mesh=mesh, in_specs=PartitionSpec(), out_specs=everywhere, check_vma=False
    )(number)


def checksum(array: Any, number: Any) -> Any:
    """The checksum of all bits of an array of plain numbers, in a few words."""
    words = _words(array).reshape(-1)
    places = jax.lax.iota(jnp.uint32, words.size) + number
    sums = [jnp.sum(_mixed(words ^ _mixed(places * odd)), dtype=jnp.uint32) for odd in _ODD]
    return jnp.stack(sums)


def _words(array: Any) -> Any:
    """The bits of an array, in words."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    bits = 8 * np.dtype(array.dtype).itemsize
    word = jnp.uint32 if bits > 32 else f"uint{bits}"
    return jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)


def _mixed(words: Any) -> Any:
    """Other words, each bit of which depends on all bits of one; no two come to the same."""
    for shift, odd in ((16, np.uint32(0x85EBCA6B)), (13, np.uint32(0xC2B2AE35))):
        words = (words ^ (words >> shift)) * odd
    return words ^ (words >> 16)


def _exercises(number: Any, size: int) -> list[Any]:
    """Results of every kind of computation, one for each of :data:`UNITS`."""
    bits = _mixed(jax.lax.iota(jnp.uint32, 2 * size * size) + number * _ODD[0])
    # From -0.5 to 0.5, by their mantissas.
    real = jax.lax.bitcast_convert_type(bits >> 9 | np.uint32(0x3F800000), jnp.float32) - 1.5
    one, other = real.reshape(2, size, size)
    low = [each.astype(jnp.bfloat16) for each in (one, other)]
    products = [jnp.dot(one, other, precision="highest"), jnp.dot(*low).astype(jnp.float32)]
    sums = [one.sum(axis=0), one.sum(axis=1), jnp.cumsum(other, axis=1)[:, -1], one.max(axis=0)]
    functions = [jnp.sin(8 * one), jnp.exp(4 * one), jnp.log(1 + one), jnp.tanh(one),
                 one / other, jnp.sqrt(jnp.abs(other))]  # fmt: skip
    whole = bits.reshape(2, -1)
    integers = [whole[0] * whole[1], whole[0] // (whole[1] | 1), jax.lax.population_count(bits),
                whole[0] << (whole[1] & 31), whole[0] & ~whole[1]]  # fmt: skip
    mixed = jnp.take(one.reshape(-1), bits % one.size)
    return [
        jnp.concatenate(products),
        jnp.concatenate(sums),
        jnp.stack(functions),
        jax.lax.sort(bits),
        jnp.concatenate(integers),
        jnp.concatenate([mixed, jnp.roll(one.T, 7).reshape(-1), one[::-1].reshape(-1)]),
    ]
