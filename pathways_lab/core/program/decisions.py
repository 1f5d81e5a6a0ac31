"""Which steps of a program exclude each other, and which values are certain.

Problem: a step with a condition may never run.  A value of a branch may be read in this branch
only, unless every other branch of the decision makes it too; and no two steps that both
run may make one value.  Then every wait for a value ends, whatever is decided.

How: a *scope* is a condition, or None, where everything always runs.  The step that makes a
decision has a scope of its own, so scopes form a tree.  A value that is made in all cases of a
decision is certain in the scope around it.

Rule for maintainers: pure, and linear in the steps: a loop is a long chain of decisions.

Paper: section 4.5 (a node whose needs are unknown until a predecessor ends).
"""

from __future__ import annotations

from collections.abc import Iterable

from pathways_lab.core.program.program import ValueId, When


class Scopes:
    """The values that are certain in each scope, as far as steps were looked at in order."""

    def __init__(self, inputs: Iterable[ValueId]) -> None:
        self._certain: dict[ValueId, set[When | None]] = {value: {None} for value in inputs}
        self._makers: dict[ValueId, dict[When | None, None]] = {}
        self._below: dict[ValueId, dict[When | None, ValueId]] = {}
        self._cases: dict[ValueId, int] = {}
        self._around: dict[ValueId, When | None] = {}

    def enter(self, when: When | None) -> str:
        """A step has this condition: "", or what is wrong with it."""
        if when is None:
            return ""
        makers = self._makers.get(when.value, {})
        if len(makers) != 1:
            return f"waits for a decision by value {when.value}, which no single earlier step makes"
        if self._cases.setdefault(when.value, when.cases) != when.cases or not (
            0 <= when.case < when.cases
        ):
            return f"waits for case {when.case} of {when.cases} of value {when.value}"
        (self._around[when.value],) = makers
        return ""

    def certain(self, value: ValueId, when: When | None) -> bool:
        """Whether a step in this scope surely finds the value made."""
        made = self._certain.get(value, set())
        if None in made:
            return True
        at = when
        while at is not None:
            if at in made:
                made.add(when)  # what is deeper in the chain asks here, and not at its begin
                return True
            at = self._around[at.value]
        return False

    def own(self, value: ValueId, when: When | None) -> bool:
        """Whether the value is made under this very condition, or there is none."""
        return when is None or self._makers.get(value) == {when: None}

    def make(self, value: ValueId, when: When | None) -> bool:
        """A step in this scope makes the value; False: another step may have made it."""
        if value in self._certain and value not in self._makers:
            return False  # an input
        makers = self._makers.setdefault(value, {})
        below = self._below.setdefault(value, {})
        for first in makers if len(makers) == 1 else ():
            self._exclude(first, makers, below)
        if when in makers or when in below:
            return False
        makers[when] = None
        if len(makers) > 1 and not self._exclude(when, makers, below):
            return False
        self._spread(value, when)
        return True

    def _exclude(
        self,
        when: When | None,
        makers: dict[When | None, None],
        below: dict[When | None, ValueId],
    ) -> bool:
        """Mark the scopes around a maker; False: another one may run with it.

        A value with one maker has no marks: a chain of decisions would have one for each pair.
        """
        at = when
        while at is not None:
            around = self._around[at.value]
            if around in makers or below.get(around, at.value) != at.value:
                return False
            if around in below:
                break
            below[around] = at.value
            at = around
        return True

    def _spread(self, value: ValueId, when: When | None) -> None:
        """It is certain there, and around a decision in whose every case it is."""
        made = self._certain.setdefault(value, set())
        made.add(when)
        while when is not None:
            cases = range(when.cases)
            if not all(When(when.value, case, when.cases) in made for case in cases):
                return
            when = self._around[when.value]
            made.add(when)
