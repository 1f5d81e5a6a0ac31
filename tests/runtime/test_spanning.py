"""Slices that span hosts, through the interface that a host has for its devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_lab.core.errors import Failure
from pathways_lab.core.slices.topology import SliceBinding
from pathways_lab.runtime import jax_private
from pathways_lab.runtime.islands import multi_host_runtime
from pathways_lab.runtime.islands.multi_host_runtime import SpanningCpuRuntime
from pathways_lab.runtime.islands.process_group import Formation, why_hosts_stay_apart
from pathways_lab.transport.codec import pack, unpack
from tests.runtime.formation_kit import LONG, Error, Host, Island

H0, H1 = "h0", "h1"
WHOLE = [1, [2, 2], [(H0, 0), (H0, 1), (H1, 0), (H1, 1)]]
TURNED = [2, [4], [(H1, 1), (H0, 0), (H1, 0), (H0, 1)]]
UNEVEN = [3, [3], [(H0, 2), (H1, 2), (H1, 3)]]
ALONE = [4, [2], [(H0, 0), (H0, 1)]]


def bound(slice_id: int, shape: list[int], devices: list[tuple[str, int]]) -> SliceBinding:
    axes = ("x", "y", "z")[: len(shape)]
    return SliceBinding(slice_id, "kernel-1", "island0", tuple(shape), axes, tuple(devices), "cpu")


def test_a_formation_is_numbered_by_rank_and_local_number() -> None:
    formation = Formation.of(bound(*TURNED), 7, 2)  # type: ignore[arg-type]
    assert formation.parts == ((H0, (0, 1)), (H1, (0, 1)))
    assert formation.footprint == ((H0, 0), (H0, 1), (H1, 0), (H1, 1))
    assert formation.hosts == (H0, H1)
    assert formation.rank(H1) == 1
    assert formation.footprint == Formation.of(bound(*WHOLE), 8, 2).footprint  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        formation.rank("h2")
    assert str(formation) == "formation 7 of h0[0, 1] + h1[0, 1]"
    assert unpack(Formation, pack(formation)) == formation


def test_windows_is_told_the_way_out() -> None:
    assert why_hosts_stay_apart("cpu", "linux") is None
    assert why_hosts_stay_apart("gpu", "win32") is None
    failure = why_hosts_stay_apart("cpu", "win32")
    assert failure is not None
    assert "hosts_per_island=1" in failure.remedy
    assert "WSL 2" in failure.remedy


def test_a_jaxlib_without_collectives_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_hosts_stay_apart("cpu") is None
    monkeypatch.delattr(jax_private._jax, "make_gloo_tcp_collectives")
    failure = why_hosts_stay_apart("cpu")
    assert failure is not None
    assert "built without collectives" in failure.message
    assert why_hosts_stay_apart("gpu") is None


def test_a_broken_collective_waits_for_the_news(tmp_path: Path) -> None:
    """Connections break before the control plane can say who died; other errors do not wait."""
    runtime = SpanningCpuRuntime(H0, tmp_path, devices=2)
    on = bound(*WHOLE)  # type: ignore[arg-type]
    runtime.span(on.slice, Formation.of(on, 7, 0))
    broken = Failure("execute", "f failed: ...", node="f", host=H0, details="... Gloo ... reset")
    news = threading.Timer(0.05, runtime.dissolve, (7, "h1 was lost: killed"))
    news.start()
    said: list[object] = []
    explained = runtime.explained(on, 7, broken, lambda *news: said.append(news))
    assert said == [], "somebody else has said it"
    assert (explained.kind, explained.message) == ("lost", "f failed: h1 was lost: killed")
    assert explained.details == broken.details
    own = Failure("execute", "f failed: division by zero", node="f", host=H0)
    assert runtime.explained(on, 7, own, lambda *news: None) is own
    news.join()


def test_without_news_a_broken_collective_says_what_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_host_runtime, "_NEWS_SECONDS", 0.0)
    runtime = SpanningCpuRuntime(H0, tmp_path, devices=2)
    on = bound(*WHOLE)  # type: ignore[arg-type]
    runtime.span(on.slice, Formation.of(on, 7, 0))
    broken = Failure("execute", "f failed: ...", node="f", host=H0, details="... Gloo ... reset")
    said: list[tuple[int, str]] = []
    assert runtime.explained(on, 7, broken, lambda *news: said.append(news)) is broken
    assert [number for number, _ in said] == [7]

    def answer(number: int, reason: str) -> None:
        runtime.dissolve(number, reason)

    explained = runtime.explained(on, 7, broken, answer)
    assert explained.kind == "lost"
    assert "the connections between its hosts broke" in explained.message


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_of_a_slice_that_was_closed_no_news_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Else each gang in flight would hold up whoever computes on the same devices next."""
    monkeypatch.setattr(multi_host_runtime, "_NEWS_SECONDS", 0.0 if when == "before" else 5.0)
    runtime = SpanningCpuRuntime(H0, tmp_path, devices=2)
    on = bound(*WHOLE)  # type: ignore[arg-type]
    runtime.span(on.slice, Formation.of(on, 7, 0))
    broken = Failure("execute", "f failed: ...", node="f", host=H0, details="... Gloo ... reset")
    if when == "before":
        runtime.dissolve(7, "h1 was lost: killed")
        runtime.close(on)
    closing = threading.Timer(0.05, runtime.close, (on,))
    closing.start()
    said: list[object] = []
    assert runtime.explained(on, 7, broken, lambda *news: said.append(news)) is broken
    assert said == []
    closing.join()


def test_a_broken_collective_says_nothing_of_hosts_that_were_formed_again(tmp_path: Path) -> None:
    """Its error may come late: the connections of the new formation are well."""
    runtime = SpanningCpuRuntime(H0, tmp_path, devices=2)
    on = bound(*WHOLE)  # type: ignore[arg-type]
    for number in (7, 8):
        runtime.span(on.slice, Formation.of(on, number, 0))
    broken = Failure("execute", "f failed: ...", node="f", host=H0, details="... Gloo ... reset")
    said: list[object] = []
    assert runtime.explained(on, 7, broken, lambda *news: said.append(news)) is broken
    assert said == []


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    made = Island(folder)
    made.all("runtime", patience=2.0)
    yield made
    made.close()


def form(island: Island, *bindings: list[object]) -> int:
    """One formation for these slices."""
    number, address = island.open(2)
    for binding in bindings:
        island.all("span", number=number, binding=binding)
    assert island.all("form", number=number, address=address) == [None, None]
    return number


def dissolve(island: Island, number: int, *bindings: list[object]) -> None:
    island.all("dissolve", number=number)
    for binding in bindings:
        island.all("unbind", binding=binding)


@pytest.mark.cluster
def test_slices_span_hosts_in_any_order(island: Island) -> None:
    """One formation serves two slices of the same devices; results are where they belong."""
    number = form(island, WHOLE, TURNED)
    # ((1, 2), (3, 4)) summed over rows, on each device of its column.
    assert island.all("sum_on", binding=WHOLE, meeting="a") == [
        {"0": [4.0], "1": [6.0]},
        {"2": [4.0], "3": [6.0]},
    ]
    found = island.all("sum_on", binding=TURNED, meeting="b")
    assert found == [{"1": [10.0], "3": [10.0]}, {"0": [10.0], "2": [10.0]}]
    other = form(island, UNEVEN)
    assert island.all("sum_on", binding=UNEVEN) == [{"0": [6.0]}, {"1": [6.0], "2": [6.0]}]
    assert island.hosts[0].do("sum_on", binding=ALONE) == {"0": [3.0], "1": [3.0]}
    dissolve(island, number, WHOLE, TURNED)
    dissolve(island, other, UNEVEN)


@pytest.mark.cluster
def test_a_slice_opens_when_its_hosts_have_joined(island: Island) -> None:
    """Opening waits for the word of the control plane and for the other host."""
    for host in island.hosts:
        host.ask("sum_on", thread="open", binding=WHOLE)
    assert island.hosts[0].waits("open")
    number, address = island.open(2)
    island.all("span", number=number, binding=WHOLE)
    for host in island.hosts:
        assert host.waits("open", 0.1)
        host.ask("form", thread="form", number=number, address=address)
    for host in island.hosts:
        assert host.value("form") is None
        assert sorted(host.value("open").values()) == [[4.0], [6.0]]
    dissolve(island, number, WHOLE)


@pytest.mark.cluster
def test_two_formations_of_the_same_devices(island: Island) -> None:
    """A new slice does not care that the formation of an older one ends late."""
    first = form(island, WHOLE)
    island.all("sum_on", binding=WHOLE)
    second = form(island, TURNED)
    assert island.all("sum_on", binding=TURNED)[0] == {"1": [10.0], "3": [10.0]}
    assert island.all("sum_on", binding=WHOLE)[0] == {"0": [4.0], "1": [6.0]}
    dissolve(island, first, WHOLE)
    assert island.all("sum_on", binding=TURNED)[0] == {"1": [10.0], "3": [10.0]}
    with pytest.raises(Error, match="do not compute together: their runtime was not formed"):
        island.hosts[0].do("sum_on", binding=WHOLE)
    dissolve(island, second, TURNED)


@pytest.mark.cluster
def test_a_slice_whose_formation_never_came(island: Island) -> None:
    """Whoever opens it is told why, at once."""
    number, _ = island.open(2)
    island.all("span", number=number, binding=WHOLE)
    for host in island.hosts:
        host.ask("sum_on", thread="open", binding=WHOLE)
    assert island.hosts[0].waits("open", 0.1)
    island.all("dissolve", number=number)
    for host in island.hosts:
        with pytest.raises(Error, match="do not compute together: the test says so"):
            host.value("open")
    island.all("unbind", binding=WHOLE)
    # A number that nobody knows is no error.
    island.all("dissolve", number=number)


@pytest.mark.cluster
def test_the_runtime_of_accelerators_on_a_stand_in(folder: Path) -> None:
    """The path that GPUs and TPUs take, on JAX's own CPU platform: two processes, one client."""
    flags = LONG + " --xla_force_host_platform_device_count=2"
    island = Island(folder, hosts=0)
    hosts = [Host(name, folder, flags, JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo") for name in "ab"]
    try:
        _, address = island.open(2)
        binding = [9, [2, 2], [("b", 1), ("a", 0), ("a", 1), ("b", 0)]]
        for host in hosts:
            host.ready().ask("platform", address=address, hosts=["a", "b"], binding=binding)
        assert hosts[0].value() == [2, {"1": [6.0], "2": [4.0]}]
        assert hosts[1].value() == [2, {"0": [4.0], "3": [6.0]}]
    finally:
        for host in hosts:
            host.child.end()
        island.close()
