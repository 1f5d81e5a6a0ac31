"""Every notebook that ships is executed from top to bottom, and keeps what it showed.

The paper's example computes with optimised code, as a reader's notebook does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pathways_lab.cli import demo, shipped

pytestmark = pytest.mark.cluster

NOTEBOOKS = sorted(path.name for path in shipped.notebooks().glob("*.ipynb"))
LARGEST_OUTPUT = 100_000
OPTIMISED = "01_paper_example.ipynb"


def test_there_are_notebooks() -> None:
    assert {"00_quickstart.ipynb", "01_paper_example.ipynb"} <= set(NOTEBOOKS)
    assert "02_gangs_and_deadlock.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_from_top_to_bottom(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It raises where it says so only; live views have become static pictures of bounded size."""
    if name == OPTIMISED:
        request.getfixturevalue("optimised_alone")
    assert demo.run(name, tmp_path) == 0
    executed = json.loads((tmp_path / name).read_text())
    pictures = 0
    for cell in executed["cells"]:
        source = "".join(cell["source"])
        raised = any(output["output_type"] == "error" for output in cell.get("outputs", ()))
        assert raised == ("raises-exception" in cell["metadata"].get("tags", ())), source
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            assert "application/vnd.jupyter.widget-view+json" not in data, source
            html = "".join(data.get("text/html", ""))
            if "data:image/svg+xml" in html:
                pictures += 1
                assert sum(len("".join(part)) for part in data.values()) <= LARGEST_OUTPUT
    assert pictures > 0
