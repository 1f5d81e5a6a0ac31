"""Functions of the user's own modules travel by value; everything else by name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from pathways_lab.client import byvalue

SOURCE = """
import math
SCALE = 3

def helper(x):
    return x * SCALE + math.floor(1.5)
"""


@pytest.mark.parametrize("text", ["module.helper", "lambda x: module.helper(x)"])
def test_a_host_needs_no_file_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "beside_the_notebook.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("beside_the_notebook")
    before = cloudpickle.list_registry_pickle_by_value()
    data = byvalue.dumps(eval(text, {"module": module}))
    assert cloudpickle.list_registry_pickle_by_value() == before
    code = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read())(2))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, timeout=60, check=False
    )
    assert done.stdout.split() == [b"7"], done.stderr
    # By name it would not work: that is what this is for.
    by_name = cloudpickle.dumps(module.helper)
    failed = subprocess.run(
        [sys.executable, "-c", code], input=by_name, capture_output=True, timeout=60, check=False
    )
    assert b"No module named 'beside_the_notebook'" in failed.stderr


def test_a_module_may_be_loaded_under_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "known_twice.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("known_twice")
    monkeypatch.setitem(sys.modules, "known_twice_again", module)
    before = cloudpickle.list_registry_pickle_by_value()
    assert b"helper" in byvalue.dumps(module.helper)
    assert cloudpickle.list_registry_pickle_by_value() == before
