"""Donated arguments: overwritten only where a result takes their memory, as XLA decides it."""

from __future__ import annotations

import pytest

from pathways_lab.door.programs import overwritten


@pytest.mark.parametrize(
    ("donors", "ins", "outs", "found"),
    [
        ({}, [8], [8], ()),
        ({0: None}, [8], [8], (0,)),
        ({0: None}, [8], [16], ()),
        ({0: None, 1: None}, [8, 8], [8], (0,)),
        ({0: 0}, [8], [8], (0,)),
        ({0: None, 1: 0}, [8, 8], [8], (1,)),
        ({0: None, 1: 0}, [8, 8], [8, 8], (0, 1)),
    ],
)
def test_a_donor_is_overwritten_by_a_result_of_its_size(donors, ins, outs, found):
    assert overwritten(donors, ins, outs) == found
