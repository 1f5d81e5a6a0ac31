"""Causes of waiting that were injected into real runs are told, one run of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.timeline import real

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def runs() -> Iterator[real.Runs]:
    with real.machine() as made:
        yield made


@pytest.mark.parametrize("kind", real.KINDS)
def test_the_cause_that_was_injected_is_told_and_no_other(runs: real.Runs, kind: str) -> None:
    assert real.wrong(runs, kind, seed=1) == ""
