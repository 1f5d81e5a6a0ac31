"""``doctor``: one line for each thing the lab needs: state, what, what to do.

Problem: "it does not start" has a dozen causes outside this project.  Each is
looked at by itself, and each finding brings its remedy.

Rule for maintainers: a check never raises out of here and never changes the
machine; what is optional is never a failure; no check needs a package that it
is itself looking for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from pathways_lab.cli import checks_jupyter, checks_machine, checks_packages
from pathways_lab.cli.finding import Finding

Check = Callable[[], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    checks_machine.python_and_platform,
    checks_packages.requirements,
    checks_packages.imports,
    checks_packages.accelerators,
    checks_machine.compiler,
    checks_machine.loopback,
    checks_machine.unix_sockets,
    checks_machine.shared_memory,
    checks_machine.memory,
    checks_machine.open_files,
    checks_machine.kept_labs,
    checks_jupyter.lab,
    checks_jupyter.kernel,
    checks_jupyter.server_extension,
    checks_jupyter.widgets,
    checks_jupyter.bokehjs,
    checks_jupyter.chromium,
)

COLOURS = {"ok": "32", "note": "36", "warn": "33", "FAIL": "31"}


def findings(checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """All findings, in order.  A check that raises becomes a warning about itself."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            title = check.__name__.replace("_", " ")
            yield Finding(
                "warn", f"{title}: could not be checked ({type(error).__name__}: {error})"
            )


def lines(finding: Finding, colour: bool) -> list[str]:
    """The text of one finding: state and what, then the remedy below it."""
    state = f"{finding.state:4}"
    if colour:
        state = f"\x1b[{COLOURS[finding.state]}m{state}\x1b[0m"
    text = [f"{state}  {finding.what}"]
    if finding.remedy:
        text.append(f"      -> {finding.remedy}")
    return text


def run(
    out: TextIO | None = None,
    checks: Iterable[Check] = CHECKS,
    start: str = "python -m pathways_lab lab",
) -> int:
    """Print all findings and a summary; returns 1 when the lab cannot run, else 0."""
    out = out or sys.stdout
    colour = out.isatty() and "NO_COLOR" not in os.environ
    count = dict.fromkeys(COLOURS, 0)
    for finding in findings(checks):
        count[finding.state] += 1
        print(*lines(finding, colour), sep="\n", file=out, flush=True)
    if count["FAIL"]:
        print(f"\nThe lab cannot run here yet: {count['FAIL']} to mend.", file=out)
        return 1
    doubtful = f" ({count['warn']} to look at)" if count["warn"] else ""
    print(f"\nThe lab can run here{doubtful}: {start}", file=out)
    return 0
