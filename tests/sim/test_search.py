"""Laws: no random workload breaks the rules, and without any one of them some workload does.

The full search is ``python -m pathways_lab.sim.search --seeds 10000``; here a
few hundred of its workloads, and for every rule the counter-examples that it
found: workloads that break without the rule, and do not break with it.
"""

from __future__ import annotations

import pytest

from pathways_lab.core.questions import Questions
from pathways_lab.sim.search import WITHOUT, main, search, shape_of


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_workload_breaks_the_rules(first: int) -> None:
    for seed in range(first, first + 50):
        assert search(seed).broken == ""


KEPT = {
    "liveness": (6, 35, 77),
    "order": (8, 9, 10),
    "overtaking": (2, 4, 8),
    "peak": (7, 10, 19),
    "poison": (5, 30, 38),
    "predecessors": (1, 3, 9),
    "producers": (10, 35, 59),
    "stalemate": (7, 10, 19),
}
"""Counter-examples: seeds by the rule that they need.

A change of the core may make one of them harmless; ``--without RULE --keep-going``
finds others.
"""


def test_every_rule_has_counter_examples() -> None:
    assert KEPT.keys() == WITHOUT.keys()


@pytest.mark.parametrize("rule", sorted(WITHOUT))
def test_without_the_rule_its_counter_examples_break_and_with_it_they_do_not(rule: str) -> None:
    shape = shape_of(0, rule)
    assert any(search(seed, shape, without=rule).broken for seed in KEPT[rule])
    assert [search(seed, shape).broken for seed in KEPT[rule]] == ["", "", ""]


def test_a_core_that_waits_for_an_answer_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that answer from elsewhere are searched for too."""
    monkeypatch.setattr(Questions, "answered", lambda self, question, run: None)
    assert any("ended 0 times" in search(seed).broken for seed in range(0, 60, 3))


def test_a_workload_is_the_same_every_time() -> None:
    assert search(11) == search(11)


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5"]) == 0
    assert "5 workloads" in capsys.readouterr().out
    assert main(["--seeds", "50", "--without", "order"]) == 0
    assert "seed 8: run" in capsys.readouterr().out
    assert main(["--seeds", "1", "--without", "poison"]) == 1  # and found nothing
