"""Completion of the options of ``%%pw_program`` and the line magics.

Rule for maintainers: the options are read from the magics' own parsers, so
that nothing is listed twice.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from typing import Any

IDENTIFIER = "pathways_lab_options"


def candidates(parser: argparse.ArgumentParser, before: str, word: str) -> list[str]:
    """The words that may stand at the cursor.

    before: the line up to *word*, without the magic's name; word: what is typed of it.
    """
    try:
        given = shlex.split(before)
    except ValueError:
        return []
    options = {text: action for action in parser._actions for text in action.option_strings}
    last = options.get(given[-1]) if given else None
    if last is not None and last.nargs != 0:
        choices = [str(choice) for choice in last.choices or getattr(last, "values", None) or ()]
        head, comma, tail = word.rpartition(",")
        return [f"{head}{comma}{choice}" for choice in choices if choice.startswith(tail)]
    free = [text for text in options if text.startswith("--") and text not in given]
    return [text for text in free if text.startswith(word)]


def matcher(parsers: Mapping[str, Any]) -> Callable[[Any], Any]:
    """An IPython matcher.  parsers: by the magic's name with its percent signs."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier=IDENTIFIER)  # type: ignore[untyped-decorator,unused-ignore]
    def options(context: Any) -> Any:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        magic, space, rest = line.lstrip().partition(" ")
        parser = parsers.get(magic)
        if parser is None or not space or (magic.startswith("%%") and context.cursor_line):
            return {"completions": [], "suppress": False}
        before, _, word = rest.rpartition(" ")
        # The editor's word may begin later than ours, for example after the dashes.
        token = context.token if word.endswith(context.token) else word
        skipped = len(word) - len(token)
        found = candidates(parser, before, word)
        return {
            "completions": [SimpleCompletion(text[skipped:], type="option") for text in found],
            "suppress": bool(found),
            "matched_fragment": token,
        }

    made: Callable[[Any], Any] = options
    return made
