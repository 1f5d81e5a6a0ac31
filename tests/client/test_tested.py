"""``lab.check_nans``: what is called meanwhile is other code, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

import pathways_lab as pw
from pathways_lab.client.lab.diagnostics import Care, Checking
from tests.client.kit import FakeLab


def announced(fake: FakeLab) -> list[dict[str, Any]]:
    fake.settle()
    return fake.of("function")


def check(fake: FakeLab, *on: bool, **how: bool) -> Checking:
    lab = SimpleNamespace(session=fake.session)
    return Care.check_nans(cast(Care, lab), *on, **how)


def test_only_what_is_called_in_the_block_is_tested_code(fake: FakeLab) -> None:
    double = pw.jit(lambda x: x * 2, on=fake.slice(2), name="double")

    @pw.program
    def twice(x: Any) -> Any:
        return double(double(x))

    x = np.ones(2, np.float32)
    plain = [double(x), twice(x)]
    before = announced(fake)
    with check(fake, infs=True):
        tested = [double(x), double(plain[0]), double(plain[0]), twice(x)]
        with check(fake):
            tested.append(double(x))
    for handle in tested:
        handle.result()
    after = announced(fake)
    assert all(not fields["checks"] for fields in before)
    asked = [{*f["checks"]} for f in after[len(before) :]]
    assert asked == [{"debug_nans", "debug_infs"}] * (len(asked) - 1) + [{"debug_nans"}]
    keys = [fields["function"] for fields in after]
    assert len(set(keys)) == len(keys), "other code has another key, the same code the same"
    plain += [double(x), double(plain[0]), twice(x)]
    assert len(announced(fake)) == len(after), "and afterwards the old code is there"
    for handle in (*plain, *tested):
        assert float(np.sum(handle.result())) in (4.0, 8.0)


def test_it_is_on_until_it_is_ended(fake: FakeLab) -> None:
    check(fake)
    assert repr(check(fake, infs=True)) == "<gangs are tested for infs and nans>"
    assert repr(check(fake, False)) == "<gangs are tested for nothing>"
    assert not fake.session.checks
