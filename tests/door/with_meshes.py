"""A program over two meshes, compiled and called as upstream's front of Shardy does it.

``python with_meshes.py FILE``: of IFRT IR.  Prints the results of two calls, and what was consumed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jaxlib
import numpy as np
from jax._src.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import mpmd

sys.modules["jax.jaxlib"], sys.modules["jax.jaxlib._jax"] = jaxlib, _jax
from jaxlib import _sdy_mpmd  # type: ignore[attr-defined]  # noqa: E402

devices = jax.devices()
first, second = (Mesh(np.array(each), ("x",)) for each in (devices[:2], devices[4:6]))
out_shardings = [NamedSharding(second, P("x")), NamedSharding(first, P())]
kind = jax.core.ShapedArray((4, 4), np.dtype(np.float32))
context = mlir.make_ir_context()
with context, ir.Location.unknown(context):
    mpmd.register_dialect(context)
    mesh = '<"m" : <["x"=1]>>'
    dialect = f"func.func @main() attributes {{topology = #mpmd.topology<{mesh}>}} {{ return }}"
    _sdy_mpmd.lower_to_ifrt(ir.Module.parse(dialect))
    module = ir.Module.parse(Path(sys.argv[1]).read_text())
    options = _sdy_mpmd.get_compile_options(module, {})
    program = _sdy_mpmd.compile_mpmd(
        devices[0].client, module, [*devices[:2], *devices[4:6]], [kind, kind], out_shardings,
        options,
    )  # fmt: skip
rng = np.random.default_rng(0)
w, x = rng.normal(size=(2, 4, 4)).astype(np.float32)
w = jax.device_put(w, NamedSharding(first, P()))
x = jax.device_put(x, NamedSharding(first, P("x")))
for _ in range(2):
    given = w
    y, w = program.execute([given, x])
    print(np.asarray(y).tolist(), np.asarray(w).tolist(), given.is_deleted(), x.is_deleted())
print([each.sharding.device_set == set(mesh.devices) for each, mesh in ((y, second), (w, first))])
