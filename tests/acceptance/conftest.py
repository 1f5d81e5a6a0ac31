"""One embedded lab for the module: two islands of one host with four devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pathways_lab as pw


@pytest.fixture(scope="module")
def lab() -> Iterator[pw.Lab]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=4) as started:
        yield started
