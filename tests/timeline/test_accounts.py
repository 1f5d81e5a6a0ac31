"""Accounts of clients add up to what the machine did."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_lab.timeline.accounts import accounts_of
from pathways_lab.timeline.busy import utilisation
from pathways_lab.timeline.records import Event, Span

HOSTS = {"a/0": "a", "a/1": "a", "b/0": "b"}
JOINED = [Event("host-joined", 0.0, island, host) for host, island in HOSTS.items()]


def gang(start: float, seconds: float, host: str, devices: tuple[int, ...], client: str) -> Span:
    return Span("gang", start, start + seconds, HOSTS[host], host, devices, client=client)


def moved(source: str, target: str, nbytes: int, client: str, kind: str = "transfer") -> Span:
    args = {"nbytes": nbytes, "source": source, "target": target}
    return Span(kind, 0.0, 1.0, HOSTS[target], target, (0,), client=client, args=args)


CLIENTS = st.sampled_from(["ann", "bob", "cat", ""])
GANGS = st.lists(
    st.tuples(
        st.floats(0.001, 5), st.sampled_from(sorted(HOSTS)), st.sets(st.integers(0, 3)), CLIENTS
    )
)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["a/0", "a/1", "b/0", "a/0, a/1", ""]),
        st.sampled_from(sorted(HOSTS)),
        st.integers(0, 10**9),
        CLIENTS,
    )
)


@given(gangs=GANGS, moves=MOVES)
def test_rows_add_up_to_what_devices_and_links_did(
    gangs: list[tuple[float, str, set[int], str]], moves: list[tuple[str, str, int, str]]
) -> None:
    spans, now = [], 0.0
    for seconds, host, devices, client in gangs:  # one after the other, as on a device
        spans.append(gang(now, seconds, host, tuple(sorted(devices)), client))
        now += seconds
    parts = [moved(*move) for move in moves]
    found = accounts_of([*JOINED, *spans, *parts])
    busy = sum(utilisation(spans, 0.0, now).values()) * now if now else 0.0
    assert math.isclose(found.total.device_seconds, busy, abs_tol=1e-6)
    rows = found.clients.values()
    assert math.isclose(sum(r.device_seconds for r in rows), busy, abs_tol=1e-6)
    assert sum(r.gangs for r in rows) == found.total.gangs == len(spans)
    crossed = sum(n for source, target, n, _ in moves if source and source[0] != target[0])
    assert sum(r.dcn_bytes for r in rows) == found.total.dcn_bytes == crossed
    for client, row in found.clients.items():
        own = accounts_of([*JOINED, *(s for s in (*spans, *parts) if s.client == client)])
        assert own.total.gangs == row.gangs
        assert own.total.dcn_bytes == row.dcn_bytes


def test_the_table() -> None:
    records = [
        *JOINED,
        gang(0, 0.5, "a/0", (0, 1), "ann"),
        gang(0, 2, "b/0", (0,), "<bob>"),
        moved("b/0", "a/0", 4096, "ann"),
        moved("b/0", "a/0", 4096, "ann", "send"),  # the same bytes, where they left
    ]
    found = accounts_of(records, missing=7)
    assert str(found).splitlines() == [
        "client  gangs  device seconds  DCN bytes",
        "<bob>       1           2.000          0",
        "ann         1           1.000      4,096",
        "total       2           3.000      4,096",
        "(7 older records are not known any more, and not counted)",
    ]
    assert "&lt;bob&gt;" in found._repr_html_()
    assert accounts_of([]).rows() == [("total", "0", "0.000", "0")]


def test_a_gang_that_nobody_pays_for_would_show() -> None:
    spans = [gang(0, 1, "a/0", (0,), "ann"), gang(1, 1, "a/0", (0,), "")]
    found = accounts_of(spans)
    assert found.total.device_seconds == pytest.approx(2)
    assert ("(unknown)", "1", "1.000", "0") in found.rows()
