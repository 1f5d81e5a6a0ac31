"""The HTML of a page: a line of links, and the place where ``page.js`` shows the picture.

Rule for maintainers: relative addresses only, nothing from elsewhere.
"""

from __future__ import annotations

import html as text
import importlib.util
from importlib import metadata
from pathlib import Path

from pathways_lab.notebook.dashboard import PANELS, path_of


def _bokehjs() -> Path:
    """The scripts of the installed Bokeh, found without importing it."""
    found = importlib.util.find_spec("bokeh")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "server" / "static" / "js" / "bokeh.min.js"


BOKEHJS = _bokehjs()

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="pathways-lab/live.css">
<link rel="stylesheet" href="pathways-lab/dashboard.css">
<script src="pathways-lab/bokeh.min.js?v={version}"></script>
<script type="module" src="pathways-lab/dashboard.js"></script>
</head>
<body data-panels="{panels}" data-bokeh="{version}">
<nav aria-label="pages of the lab">{links}</nav>
<p id="notice" role="status" hidden></p>
<main></main>
</body>
</html>
"""


def html(panel: str = "") -> str:
    """The page of *panel*, "" for the one with the usual panels."""
    links = []
    for each in ("", *PANELS):
        here = ' aria-current="page"' if each == panel else ""
        name = text.escape(each.title() or "Overview")
        links.append(f'<a href="{path_of(each)}"{here}>{name}</a>')
    return _PAGE.format(
        title=f"Pathways: {panel or 'overview'}",
        version=metadata.version("bokeh"),
        panels=panel,
        links="".join(links),
    )
