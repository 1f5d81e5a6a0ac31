"""Fixtures of machines; what asks for them is listed as not run where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.machines import bench

Make = Callable[..., bench.Machines]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes machines: ``machines(("a", "b"), delay=0.01, loss=0.0, rate=0.0)``."""
    if reason := bench.refusal():
        pytest.skip(reason)
    with ExitStack() as made:

        def make(names: Sequence[str], **network: Any) -> bench.Machines:
            shared: Path = tmp_path_factory.mktemp("shared")
            group = bench.Machines(names, shared, **network)
            made.callback(group.close)
            return group

        yield make
