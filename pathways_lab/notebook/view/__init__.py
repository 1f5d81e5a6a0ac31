"""Live views: messages to the browser, and the frozen picture that stays."""

from pathlib import Path

PAGE = tuple(sorted(path.name for path in Path(__file__).parent.glob("*.js")))
"""The script of a page: all scripts of this folder, one after the other."""
