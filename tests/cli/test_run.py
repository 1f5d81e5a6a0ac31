"""Arguments of ``python -m pathways_lab run``, and what it runs with them."""

from __future__ import annotations

import pytest

from pathways_lab import cli
from pathways_lab.cli import run


@pytest.mark.parametrize(
    ("given", "command", "islands"),
    [
        ("train.py --islands 3 -m 2", ["train.py", "--islands", "3", "-m", "2"], 1),
        ("--islands 2 train.py --steps 5", ["train.py", "--steps", "5"], 2),
        ("-m train --islands 3", ["-m", "train", "--islands", "3"], 1),
        ("--islands 2 -m train.main -m 2", ["-m", "train.main", "-m", "2"], 2),
    ],
)
def test_a_script_or_a_module_has_all_arguments_after_it(given, command, islands, monkeypatch):
    called = []
    monkeypatch.setattr(run, "run", lambda *arguments: called.append(arguments[:2]) or 0)
    assert cli.main(["run", *given.split()]) == 0
    assert called == [(command, islands)]


@pytest.mark.parametrize("given", [[], ["-m"], ["--islands", "2"]])
def test_neither_is_an_error_that_shows_how(given, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", *given])
    assert "run script.py" in capsys.readouterr().err


def test_the_lab_of_a_script_gets_the_memory_that_is_asked_for(capsys):
    """What is no size is refused by ``pw.start`` before anything starts."""
    assert cli.main(["run", "--memory", "lots", "train.py"]) == 1
    assert "memory='lots' is not a size" in capsys.readouterr().err
