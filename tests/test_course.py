"""Exercises are graded by what answers do: right ones pass, wrong ones hear why."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pathways_lab import course
from pathways_lab.cli import shipped
from pathways_lab.core.errors import PathwaysError
from pathways_lab.pipeline import Schedule, gpipe, one_forward_one_backward


def chunks(compute: float, nbytes: float, bandwidth: float, latency: float) -> int:
    return min(
        range(1, 100), key=lambda n: course.exchange_seconds(compute, nbytes, bandwidth, latency, n)
    )


def in_turn(queues: Any) -> list[str]:
    found = []
    waiting = [list(queue) for queue in queues.values()]
    while any(waiting):
        found += [queue.pop(0) for queue in waiting if queue]
    return found


RIGHT = {
    "messages": lambda nodes, steps, captured: steps if captured else nodes * steps,
    "garbage": lambda stages, microbatches: (stages - 1) / (stages + microbatches - 1),
    "schedule": one_forward_one_backward(2, 4),
    "hangs": Schedule.read("mine", "F0 B0 F1 B1\nF1 F0 B1 B0"),
    "chunks": chunks,
    "scheduler": in_turn,
}
WRONG = {
    "messages": (lambda nodes, steps, captured: nodes * steps, "captured as one program: 1 messag"),
    "garbage": (lambda stages, microbatches: 1 / stages, "not for nothing"),
    "schedule": (gpipe(2, 4), "4 microbatches at once"),
    "hangs": (gpipe(2, 4), "does not hang"),
    "chunks": (lambda *case: 1, "is possible"),
    "scheduler": (
        lambda queues: [g for queue in queues.values() for g in queue],
        "one of each in turn",
    ),
}


def test_every_exercise_has_a_right_and_a_wrong_answer_here() -> None:
    assert set(course.EXERCISES) == set(RIGHT) == set(WRONG)


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_right_answers_pass_and_wrong_ones_hear_why(name: str) -> None:
    verdict = course.check(name, RIGHT[name])
    assert verdict, verdict
    assert "right" in verdict._repr_html_()
    wrong, why = WRONG[name]
    verdict = course.check(name, wrong)
    assert not verdict
    assert why in repr(verdict)


def test_what_is_no_answer_is_told_and_not_raised() -> None:
    assert "no answer yet" in repr(course.check("garbage", None))
    assert "ZeroDivisionError" in repr(course.check("garbage", lambda s, m: 1 / 0))
    assert "should be a Schedule" in repr(course.check("schedule", "F0 B0"))
    assert "for 3 slices and 4" in repr(course.check("schedule", gpipe(3, 4)))
    assert "another reason" in repr(course.check("hangs", Schedule.read("half", "F0")))
    with pytest.raises(PathwaysError, match="no exercise called 'nonsense'"):
        course.check("nonsense", 1)


def test_every_word_of_the_glossary_leads_to_a_section_that_is_there() -> None:
    folder = shipped.notebooks()
    links = re.findall(r"\]\(([^)#]+)#([^)]+)\)", (folder / "glossary.md").read_text())
    assert len(links) > 25
    for name, anchor in links:
        cells = json.loads((folder / name).read_text())["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        heads = re.findall(r"^#+ (.+)$", "\n".join(texts), flags=re.M)
        assert anchor in [head.replace(" ", "-") for head in heads], (name, anchor)


def test_every_exercise_stands_in_a_notebook() -> None:
    sources = "".join(path.read_text() for path in shipped.notebooks().glob("*.ipynb"))
    assert set(re.findall(r'course\.check\(\\"(\w+)\\"', sources)) == set(course.EXERCISES)
