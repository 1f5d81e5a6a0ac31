"""The documented rule that makes islands out of Dask workers."""

from __future__ import annotations

import pytest

from pathways_lab.runtime.cluster.membership import Islands, devices_of, is_rule, place_of


@pytest.mark.parametrize(
    ("name", "resources", "environment", "expected"),
    [
        ("island0/host1", {"island": 7}, {}, ("island0", "island0/host1")),
        ("a/b/c", {}, {}, ("a", "a/b/c")),
        ("w7", {"island": 3.0}, {}, ("island3", "island3/w7")),
        (4, {"island:west": 1, "devices": 2}, {}, ("west", "west/host4")),
        ("w7", {}, {"PATHWAYS_ISLAND": "lab"}, ("lab", "lab/w7")),
        (0, {}, {}, ("node12", "node12/host0")),
        ("tcp://10.0.0.7:40331", {}, {}, ("node12", "node12/host40331")),
        # As many machines use the same port as were told to.
        ("tcp://10.0.0.7:9000", {"island": 1}, {}, ("island1", "island1/node12-9000")),
        ("/", {}, {}, ("node12", "node12//")),
    ],
)
def test_first_match_wins(
    name: object,
    resources: dict[str, float],
    environment: dict[str, str],
    expected: tuple[str, str],
) -> None:
    assert place_of(name, resources, environment, "node12") == expected


def test_workers_that_nothing_is_known_of_are_one_island() -> None:
    assert place_of("w7", {}, {}, "") == ("island0", "island0/w7")


@pytest.mark.parametrize(
    ("islands", "name", "environment", "expected"),
    [
        ("job", "c-0", {"SLURM_JOB_ID": "17"}, ("job17", "job17/c-0")),
        ("job", "c-0", {"PATHWAYS_ISLAND": "lab"}, ("lab", "lab/c-0")),
        ("worker", "c-0", {}, ("c-0", "c-0/c-0")),
        ("worker", "tcp://10.0.0.7:9000", {}, ("host9000", "host9000/node12-9000")),
        (lambda machine: machine[:4], "c-0", {}, ("node", "node/c-0")),
        (lambda machine: 1 / 0, "west/c", {}, ("west", "west/c")),
    ],
)
def test_the_lab_says_which_workers_form_an_island_where_they_do_not(
    islands: Islands, name: str, environment: dict[str, str], expected: tuple[str, str]
) -> None:
    assert is_rule(islands)
    assert place_of(name, {}, environment, "node12", islands) == expected


def test_a_rule_that_finds_no_island_says_why() -> None:
    with pytest.raises(ValueError, match="the worker is in no job: none of SLURM_JOB_ID, "):
        place_of("w", {}, {}, "node12", "job")
    with pytest.raises(ValueError, match=r"islands\('node12'\) is '': the name of an island"):
        place_of("w", {}, {}, "node12", lambda machine: "")
    assert not any(map(is_rule, ("node", ["job"], None, 1)))


def test_the_number_of_devices() -> None:
    assert devices_of({"devices": 4.0}, 2) == 2
    assert devices_of({"devices": 4.0}, None) == 4
    assert devices_of({}, None) is None
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match=f"its resource devices is {wrong:g}: a host has"):
            devices_of({"devices": wrong}, None)
