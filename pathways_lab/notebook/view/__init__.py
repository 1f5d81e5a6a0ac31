"""Live views: messages to the browser, and the frozen picture that stays."""

PAGE = ("kept.js", "foot.js", "page.js", "live.js")
"""The script of a page: these files, one after the other."""
