"""Laws: no random workload breaks the rules, and without any one of them some workload does.

The full search is ``python -m pathways_lab.sim.search --seeds 10000``; here a
few hundred of its workloads, and for every rule the first one that breaks
without it, and does not break with it.
"""

from __future__ import annotations

import pytest

from pathways_lab.sim.search import WITHOUT, main, search, shape_of


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_workload_breaks_the_rules(first: int) -> None:
    for seed in range(first, first + 50):
        assert search(seed).broken == ""


@pytest.mark.parametrize("rule", sorted(WITHOUT))
def test_without_the_rule_a_workload_breaks(rule: str) -> None:
    shape = shape_of(0, rule)
    seed = next(s for s in range(100) if search(s, shape, without=rule).broken)
    assert search(seed, shape).broken == ""


def test_a_workload_is_the_same_every_time() -> None:
    assert search(11) == search(11)


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5"]) == 0
    assert "5 workloads" in capsys.readouterr().out
    assert main(["--seeds", "50", "--without", "order"]) == 0
    assert "seed 8: run" in capsys.readouterr().out
    assert main(["--seeds", "1", "--without", "poison"]) == 1  # and found nothing
