"""A short form of ``python -m tests.notebook.fuzz_pages``, and that it sees what it looks for."""

from __future__ import annotations

import asyncio

import pytest
from tornado.routing import PathMatches

from pathways_lab.notebook.dashboard import process
from pathways_lab.notebook.draw import bokeh_figures
from tests.notebook.fuzz_pages import GOOD, Fuzz, application


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bokeh_figures, "documented", lambda message: {"type": "snapshot"})


def test_whatever_is_asked_for_no_page_fails() -> None:
    fuzz = Fuzz(0)
    asyncio.run(fuzz.run(1000))
    assert {200, 400, 404, 405} <= fuzz.answers.keys()


def test_everything_that_is_served_is_asked_for() -> None:
    paths = [path.partition("?")[0] for path in GOOD]
    for rule in application().wildcard_router.rules:
        assert isinstance(rule.matcher, PathMatches)
        pattern = rule.matcher.regex
        assert any(pattern.match(path) for path in paths), pattern


def test_a_number_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_count", lambda text: int(float(text)))
    with pytest.raises(AssertionError, match="since="):
        asyncio.run(Fuzz(0).run(5000))
