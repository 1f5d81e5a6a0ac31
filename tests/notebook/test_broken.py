"""What is broken on purpose by ``python -m tests.notebook.broken`` is still there to be broken."""

from __future__ import annotations

import pytest

from tests.notebook.broken import ALL, ROOT, Broken


@pytest.mark.parametrize("broken", ALL, ids=lambda broken: broken.name)
def test_it_can_be_broken_and_has_a_test(broken: Broken) -> None:
    assert (ROOT / broken.file).read_text().count(broken.old) == 1
    file, _, test = broken.test.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text()
