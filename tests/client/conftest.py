"""A lab without a cluster, fresh for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.kit import FakeLab


@pytest.fixture
def fake() -> Iterator[FakeLab]:
    with FakeLab() as lab:
        yield lab
