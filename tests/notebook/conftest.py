"""A browser and a JupyterLab, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.jupyter import Lab, Page, chromium

ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
"""The browser knows no machine but this one."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("jupyter"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(browser: Any, lab: Lab) -> Iterator[Page]:
    """JupyterLab in the browser, which takes seconds of work to load."""
    made = Page(browser, lab)
    yield made
    made.close()


@pytest.fixture
def page(shared: Page) -> Iterator[Page]:
    """A page that must have asked for nothing from outside this machine."""
    yield shared
    shared.put_away()
    assert shared.blocked == [], "requests wanted to leave this machine"
