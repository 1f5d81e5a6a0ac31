"""Two clients do anything for some seconds; ``tests.acceptance.anything`` does it longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pathways_lab as pw
from tests.acceptance.anything import Stage, attack
from tests.acceptance.strikes import Wrong

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def test_two_clients_do_anything_in_any_order(stage: Stage) -> None:
    attack(stage, seconds=1)  # one batch
    assert stage.steps > 40


def test_a_wrong_value_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    right = pw.Handle.result

    def wrong(self: pw.Handle, *args: Any, **options: Any) -> np.ndarray[Any, Any]:
        return right(self, *args, **options) + 1

    monkeypatch.setattr(pw.Handle, "result", wrong)
    with pytest.raises(Wrong, match="was expected"):
        attack(stage, seconds=20)
