"""Causes of waiting that were injected into simulated timelines are told, to the instant."""

from __future__ import annotations

from tests.timeline import truth


def test_each_instant_of_each_device_has_the_cause_that_was_injected():
    said = [told for seed in range(60) if (told := truth.wrong(seed))]
    assert not said, "\n".join(said[:3])
