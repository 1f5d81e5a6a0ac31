"""A client process that asks for one row at a time: of a copy of its own, and of trunks.

The results of its row are compared with the first one.  Weights are made on the device, from a
seed, so a copy is no upload.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.child import serve

UNDER_WAY = 2
"""Calls of a client."""
COPIES, TURNS, TRUNK = "a copy each", "one copy, in turns", "one trunk"
"""Ways to ask; the last two are names of trunks."""


@dataclass(frozen=True)
class Model:
    """Products of one width.

    milliseconds: for which a gang holds the device.  dtype: of weights and rows.
    """

    width: int
    milliseconds: float
    layers: int = 4
    dtype: str = "float32"

    def weights(self, seed: Any) -> list[Any]:
        """Of all layers, on the device."""
        import jax

        keys = jax.random.split(jax.random.key(seed), self.layers)
        shape, scale = (self.width, self.width), self.width**-0.5
        return [(jax.random.normal(key, shape, self.dtype) * scale) for key in keys]

    def __call__(self, weights: Any, x: Any) -> Any:
        """Values stay about as large as they are."""
        import jax.numpy as jnp

        import pathways_lab as pw

        for w in weights:
            x = jnp.tanh(jnp.matmul(x, w, precision="highest"))
        return pw.emulated(self.milliseconds)(x) if self.milliseconds else x

    @property
    def name(self) -> str:
        """In tables."""
        nbytes = (2 if self.dtype == "bfloat16" else 4) * self.layers * self.width**2
        held = f", {self.milliseconds:g} ms a gang (emulated)" if self.milliseconds else ""
        size = f"{nbytes / 1e6:.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.1f} GB"
        return f"{size} of weights{held}"


class Asker:
    """A client of the lab that *file* invites to, for one model.

    copy: it has one of its own.
    """

    def __init__(self, file: str, client: str, seed: int, copy: bool, **model: Any) -> None:
        self.name, self._file, self._seed, self._copy = client, file, seed, copy
        self._model = Model(**model)
        self._expected: Any = None

    def start(self) -> None:
        import ml_dtypes  # noqa: F401  NumPy learns of bfloat16
        import numpy as np

        import pathways_lab as pw

        self._lab = pw.connect(self._file, name=self.name)
        on, model = self._lab.slice(1), self._model
        rng = np.random.default_rng(self._seed)
        self._row = pw.device_put(rng.normal(size=(1, model.width)).astype(model.dtype), on)
        self._calls: dict[str, Callable[[Any], Any]] = {}
        if self._copy:
            weights, function = pw.jit(model.weights, on=on)(0), pw.jit(model, name="model")
            self._calls[COPIES] = lambda x: function(weights, x)

    def round(self, case: str, units: int) -> tuple[float, float]:
        """Ask for so many milliseconds: seconds until all is over, and calls.

        Raises RuntimeError for a wrong result.
        """
        import numpy as np

        if case != COPIES:  # a trunk is made anew for another policy
            while case not in self._lab.published:
                time.sleep(0.001)
            self._calls[case] = self._lab.trunk(case)
        call, flying, calls = self._calls[case], deque[Any](), 0
        last, begun = None, time.perf_counter()
        while time.perf_counter() < begun + units / 1e3 or not calls:
            flying.append(call(self._row))
            calls += 1
            if len(flying) == UNDER_WAY:
                last = flying.popleft().block_until_ready()
        for each in flying:
            last = each.block_until_ready()
        seconds = time.perf_counter() - begun
        assert last is not None
        found = np.asarray(last.result()).astype(np.float32)
        if self._expected is None:
            self._expected = found
        apart = float(np.linalg.norm(found - self._expected) / np.linalg.norm(self._expected))
        rounding = 5e-3 if self._model.dtype == "bfloat16" else 2e-4
        if not apart < rounding * self._model.layers:
            raise RuntimeError(f"{self.name}, {case}: a row is {apart:.2g} away from the first")
        return seconds, calls

    def stop(self) -> None:
        self._lab.close()


if __name__ == "__main__":
    serve(Asker)
