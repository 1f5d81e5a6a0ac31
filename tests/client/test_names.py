"""What things are called, and which names there cannot be."""

from __future__ import annotations

import numpy as np

import pathways_lab as pw
from tests.client.kit import FakeLab

X = np.arange(4, dtype=np.float32)


def test_what_was_put_has_a_name(fake: FakeLab) -> None:
    left, right = fake.slice(2), fake.slice(2)
    tree = pw.device_put({"w": X, "b": [X]}, left)
    assert (tree["w"].name, tree["b"][0].name) == ("device_put['w']", "device_put['b'][0]")
    assert pw.device_put(X, left).name == "device_put"
    made = pw.jit(lambda x: x + 1, on=left, name="inc")(X)
    assert pw.device_put((made,), right)[0].name == "inc", "what has a name keeps it"
