"""The magics in a real IPython shell (without a kernel) on a real lab."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import pathways_lab as pw
from pathways_lab.client.lab import opening as labs
from pathways_lab.client.session.handles import Handle
from pathways_lab.notebook.dashboard import PAGES
from pathways_lab.notebook.kernel.errors import HOOK
from tests.runtime.processes import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::IPython.core.completer.ProvisionalCompleterWarning"),
]

SETUP = """
import jax, jax.numpy as jnp, numpy as np, pathways_lab as pw
left = lab.slice((4,), ("data",), island="island0")
right = lab.slice((2,), ("model",), island="island1")
double = pw.jit(lambda x: x * 2, on=left)
total = pw.jit(lambda x: jnp.sum(x), on=right)
x = np.arange(8, dtype=np.float32)
"""


class Shell:
    """An IPython shell with the extension loaded."""

    def __init__(self, lab: Any) -> None:
        InteractiveShell.clear_instance()
        self.ip = InteractiveShell.instance(colors="nocolor")
        self.ip.user_ns["lab"] = lab
        self.run("%load_ext pathways_lab")
        self.run(SETUP)

    def run(self, cell: str) -> Any:
        """Run a cell that must work; its value."""
        with capture_output() as self.captured:
            result = self.ip.run_cell(cell, store_history=True)
        assert result.success, result.error_in_exec or result.error_before_exec
        return result.result

    def fail(self, cell: str) -> str:
        """Run a cell that must fail; what is shown."""
        with capture_output() as captured:
            result = self.ip.run_cell(cell, store_history=True)
        assert not result.success
        self.error = result.error_in_exec or result.error_before_exec
        return str(captured.stdout + captured.stderr)

    def __getitem__(self, name: str) -> Any:
        return self.ip.user_ns[name]


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with pw.start(islands=2, hosts_per_island=1, devices_per_host=4, progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def shell(lab: Any) -> Iterator[Shell]:
    made = Shell(lab)
    yield made
    made.run("%unload_ext pathways_lab")
    InteractiveShell.clear_instance()


def test_a_cell_is_one_program_and_what_it_assigns_are_handles(shell: Shell, lab: Any) -> None:
    before = lab.submitted
    value = shell.run("%%pw_program two\ny = double(x)\nz = total(y) + 1\nparts = [y, z]\nz")
    assert lab.submitted == before + 1
    assert value is shell["z"]
    assert all(isinstance(each, Handle) for each in (shell["y"], shell["z"], *shell["parts"]))
    assert shell["parts"][0] is shell["y"]
    assert float(shell["z"]) == 57.0
    np.testing.assert_array_equal(shell["y"], 2 * np.arange(8))


def test_the_name_runs_the_cell_again_with_the_present_values(shell: Shell) -> None:
    shell.run("%%pw_program again\nz = total(double(x))\nz")
    shell.run("x = x + 1\nvalue = again()")
    assert float(shell["value"]) == float(shell["z"]) == 72.0
    assert float(shell["again"](x=np.ones(8, np.float32))) == 16.0
    with pytest.raises(TypeError, match="does not read 'q'; it reads double, total, x"):
        shell["again"](q=1)
    assert "x" in repr(shell["again"])
    shell.run("x = np.arange(8, dtype=np.float32)")


def test_running_it_again_captures_and_lowers_nothing(shell: Shell, lab: Any) -> None:
    shell.run("%%pw_program once\nz = total(double(x))")
    float(shell["z"])
    before = lab.stats()
    shell["once"]()
    after = lab.stats()
    assert (after.captured, after.lowered, after.exported) == (
        before.captured, before.lowered, before.exported,
    )  # fmt: skip
    assert after.runs == before.runs + 1


def test_an_unchanged_cell_compiles_nothing_again(shell: Shell, lab: Any) -> None:
    cell = "%%pw_program same\nw = double(x) + 3\nt = total(w)"
    shell.run(cell)
    float(shell["t"])
    before = lab.stats()
    shell.run(cell)
    float(shell["t"])
    assert lab.stats().sent["function"] == before.sent["function"]


def test_containers_that_a_cell_changes_are_changed_and_only_when_it_worked(shell: Shell) -> None:
    shell.run("seen = []")
    shell.run("%%pw_program\nseen.append(total(double(x)))")
    assert [float(each) for each in shell["seen"]] == [56.0]
    shell.fail("%%pw_program\nseen.append(total(double(x)))\n1 / 0")
    assert len(shell["seen"]) == 1


def test_a_function_of_the_cell_sees_the_notebooks_names_afterwards(shell: Shell) -> None:
    shell.run("%%pw_program\nk = double(x)\ndef peek():\n    return k")
    assert shell["peek"]() is shell["k"]


def test_printing_a_value_shows_its_shape_and_that_it_comes_later(shell: Shell) -> None:
    shell.run("%%pw_program\nprint(double(x))")
    assert "float32[8]" in shell.captured.stdout
    assert "after the run" in shell.captured.stdout


def test_dry_run_shows_the_stages_and_submits_nothing(shell: Shell, lab: Any) -> None:
    before = lab.submitted
    shell.run("%%pw_program dry --dry-run\nunborn = double(x)")
    assert lab.submitted == before
    assert "unborn" not in shell.ip.user_ns
    assert "plan dry" in shell.captured.stdout
    assert "transfer" not in shell.captured.stdout


def test_stages_of_a_program_by_name(shell: Shell) -> None:
    shell.run("%%pw_program staged\nz = total(double(x))")
    shell.run("%pw_ir staged")
    assert "transfer" in shell.captured.stdout
    text = shell.captured.stdout
    shell.run("%pw_ir")
    assert shell.captured.stdout == text
    assert "'nothing' is not a program" in shell.fail("%pw_ir nothing")


def test_operations_without_operands_go_where_the_option_says(shell: Shell) -> None:
    shell.run("%%pw_program placed --on right\nmade = jnp.zeros(4)")
    assert shell["made"].slice is shell["right"]
    assert "no slice is called 'nowhere'" in shell.fail("%%pw_program --on nowhere\ny = x")


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("y = double(x)\nif y.sum() > 3:\n    z = 1", 3, ("depends on the value", "jax.lax.cond")),
        ("y = double(x)\nawait y", 3, ("cannot wait for a value", "another cell")),
        ("y = double(\n", 2, ("SyntaxError", "never closed")),
        ("y = double(x)\nnp.asarray(y)", 3, ("NumPy was asked for the value",)),
    ],
)
def test_what_cannot_be_captured_is_refused_at_the_own_line(
    shell: Shell, body: str, line: int, words: tuple[str, ...]
) -> None:
    text = shell.fail(f"%%pw_program refused\n{body}")
    assert isinstance(shell.error, pw.PathwaysError)
    for word in words:
        assert word in text
    marked = next(each for each in text.splitlines() if "---->" in each)
    assert marked.split()[1] == str(line)
    assert f"Cell In[{shell.ip.execution_count - 1}], line {line}" in text
    assert "site-packages" not in text, "no frame of JAX, and none of ours"
    assert float(shell.run("%%pw_program\nz = total(double(x))\nz")) == 56.0, "still usable"


def test_what_is_noticed_after_the_capture_is_said_at_the_line_that_it_is_about(
    shell: Shell,
) -> None:
    """The arguments do not fit, or a slice is gone: not at the call of the magic."""
    shell.run(
        "gone = lab.slice(2, island='island0')\n"
        "cut = pw.jit(lambda x: x, on=left, in_shardings=jax.sharding.PartitionSpec('data'))\n"
        "late = pw.jit(lambda x: x, on=gone)\n"
        "seven = np.ones(7, np.float32)\n"
        "gone.release()"
    )
    for line, why in (
        ("y = cut(seven)", "not divisible"),
        ("y = late(x)", "was released"),
        ("y = jax.device_put(seven, left.sharding(jax.sharding.PartitionSpec('data')))", "not div"),
    ):
        for option in ("", "--dry-run") if "late" not in line else ("",):
            text = shell.fail(f"%%pw_program tr {option}\nz = 1\n{line}")
            assert why in text
            assert f"Cell In[{shell.ip.execution_count - 1}], line 3\n" in text
            assert next(t for t in text.splitlines() if "---->" in t).endswith(line)


def test_what_has_no_line_of_its_own_is_wrong_with_the_cell(shell: Shell, lab: Any) -> None:
    lab.publish("ones", pw.device_put(np.ones(8, np.float32), lab.slice(1)))
    with pw.Lab(lab.embedded.control, name="carl") as other:
        shell.ip.user_ns["theirs"] = other.take("ones")  # no slice of anybody's says whose it is
        text = shell.fail("%%pw_program tr\ny = double(x)\nz = double(theirs)")
        assert "belongs to another lab" in text
        assert "# %%pw_program tr" in next(t for t in text.splitlines() if "---->" in t)
        assert "run_cell_magic" not in text
    lab.unpublish("ones")


def test_values_of_another_lab_are_refused_where_they_are_used(shell: Shell, lab: Any) -> None:
    with pw.Lab(lab.embedded.control, name="carl") as other:
        shell.ip.user_ns["theirs"] = pw.device_put(np.ones(8, np.float32), other.slice(1))
        text = shell.fail("%%pw_program tr\ny = double(x)\nz = double(theirs)")
        assert "belongs to another lab, <Lab carl" in text
        assert "z = double(theirs)" in next(t for t in text.splitlines() if "---->" in t)


def test_cells_are_called_by_their_numbers_wherever_a_line_is_told(shell: Shell) -> None:
    shell.run(
        "wait = pw.jit(lambda x: x + 1, on=left)\n"
        "turn = pw.jit(lambda x: x + 2, on=right)\n"
        "a = pw.program(lambda x: turn(wait(x)))\n"
        "b = pw.program(lambda x: wait(turn(x)))\n"
        "story = pw.possible_deadlock(a.capture(x), b.capture(x))"
    )
    here = f"Cell In[{shell.ip.execution_count - 1}], line"
    assert f"at {here} 3: " in str(shell["story"])
    assert f"at {here} 4: " in str(shell["story"])
    assert "ipython-input" not in str(shell["story"])
    for cell in ("%%pw_program tr\ny = double(undefined)", "lab.dcn(latency=-1)"):
        shell.fail(cell)
        shown = "\n".join([str(shell.error), *getattr(shell.error, "__notes__", ())])
        assert f", at Cell In[{shell.ip.execution_count - 1}], line" in shown.replace(
            "\n  at", ", at"
        )
        assert "ipython-input" not in shown


def test_errors_of_the_own_code_keep_their_type_and_show_only_own_lines(shell: Shell) -> None:
    text = shell.fail("%%pw_program mine\nq = double(x)\n1 / 0\n")
    assert isinstance(shell.error, ZeroDivisionError)
    assert "----> 3 1/0" in text.replace("1 / 0", "1/0")
    assert "pathways_lab/" not in text
    everything = shell.run("%pw_traceback") or shell.captured.stdout
    assert "pathways_lab/notebook/kernel/magics.py" in everything


def test_a_wait_that_is_interrupted_shows_only_own_lines(shell: Shell) -> None:
    shell.run("held = pw.jit(lambda x: pw.emulated(5_000)(x), on=right)(x)")
    shell.run("import os, signal, threading\nstrike = os.getpid(), signal.SIGINT")
    shown = shell.fail("threading.Timer(1.0, os.kill, strike).start()\nheld.result()")
    assert isinstance(shell.error, KeyboardInterrupt)
    assert "----> 2 held.result()" in shown
    assert shown.rstrip().endswith("KeyboardInterrupt:")
    assert "pathways_lab" not in shown
    shell.run("%pw_traceback")
    assert "waiting.py" in str(shell.captured.stdout), "all of it is there for whoever wants it"


def test_a_cell_that_found_no_memory_leaves_room_for_another_try(shell: Shell) -> None:
    """Tracebacks keep the variables of functions, also that of an error of the user's before."""
    shell.run(
        "one = lab.slice(1)\n"
        "large = pw.jit(lambda: jnp.ones(400 << 18, jnp.float32), on=one)\n"
        "def train(n, end=''):\n"
        "    held = [large() for _ in range(n)]\n"
        "    jax.block_until_ready(held)\n"
        "    return int(end or n)"
    )
    shell.fail("train(1, 'mine')")
    assert isinstance(shell.error, ValueError)
    assert "was given up" in shell.fail("train(3)")
    assert shell.run("train(2)") == 2
    shell.fail("train(3)")
    shell.run("%pw_traceback")
    assert "jax.block_until_ready(held)" in shell.captured.stdout
    shell.run("one.release()")


@pytest.mark.parametrize(
    "cell",
    [
        "def wrong(v):\n    return {}['nokey']\npw.jit(wrong, on=left)(x)",
        "@pw.program\ndef wrong(v):\n    return {}['nokey']\nwrong(x)",
        "double({}['nokey'])",
    ],
)
def test_errors_of_the_own_code_show_only_own_lines_wherever_they_are_raised(
    shell: Shell, cell: str
) -> None:
    shown = shell.fail(cell)
    assert isinstance(shell.error, KeyError)
    assert "['nokey']" in shown
    assert "pathways_lab/" not in shown
    assert shown.count("---->") <= 2, "the call, and the line in the function"


def test_a_call_that_is_interrupted_shows_only_own_lines(shell: Shell) -> None:
    shell.run("import os, signal\ndef strike(v):\n    os.kill(os.getpid(), signal.SIGINT)")
    shown = shell.fail("pw.jit(strike, on=left)(x)")
    assert isinstance(shell.error, KeyboardInterrupt)
    assert "pathways_lab/" not in shown


def test_containers_of_handles_show_what_these_are(shell: Shell) -> None:
    looks = shell.ip.display_formatter.format
    handle = shell.run("double(x)")
    for value in (handle, [handle], {"w": (handle,)}):
        assert looks(value)[0]["text/plain"].count("<Handle ") == 1


def test_an_error_on_a_device_is_shown_at_the_line_that_caused_it(shell: Shell) -> None:
    shell.run(
        "def check(v):\n    raise ValueError('the sensor is broken')\n"
        "def guarded(v):\n"
        "    return jax.pure_callback(check, jax.ShapeDtypeStruct((), v.dtype), v.sum())\n"
        "guard = pw.jit(guarded, on=left)"
    )
    shell.run("%%pw_program broken\ng = guard(x)\nafter = total(g)")
    for name in ("g", "after"):
        text = shell.fail(f"{name}.result()")
        assert isinstance(shell.error, pw.PathwaysError)
        assert "the sensor is broken" in text
        assert "program broken, node guarded" in text
        assert next(t for t in text.splitlines() if "---->" in t).endswith("g = guard(x)")
    shell.run("%pw_traceback")
    assert "check" in shell.captured.stdout


def test_what_functions_print_on_hosts_is_printed_by_whoever_waits(shell: Shell) -> None:
    shell.run(
        "def loud(v):\n    jax.debug.print('sum {}', v.sum())\n    return v + 1\n"
        "louder = pw.jit(loud, on=left)"
    )
    shell.run("%%pw_program\nw = louder(x)")
    printed: list[str] = []

    def heard() -> bool:
        shell.run("w.block_until_ready()")
        printed.append(shell.captured.stdout)
        return "[island0/host0 device 0] sum 28.0" in "".join(printed)

    until(heard)


def test_devices_and_cluster(shell: Shell, lab: Any) -> None:
    table = shell.run("%pw_devices")
    lines = repr(table).splitlines()
    assert lines[0].split()[:4] == ["island", "host", "device", "kind"]
    assert len(lines) == 1 + 8
    assert "slice s1 (4: data)" in lines[1]
    assert lines[-1].split()[-1] == "free"
    assert "<table>" in table._repr_html_()
    assert shell.run("%pw_cluster") is lab
    page = shell.run("%pw_dashboard order")
    assert re.fullmatch(r"http://127.0.0.1:\d+/individual-pathways-order", str(page))
    assert f'<iframe src="{page.source}"' in page._repr_html_()


def test_a_view_in_plain_ipython_is_text(shell: Shell) -> None:
    shell.run("float(total(double(x)))")
    shell.run("lab.view('queues')")
    text = "".join(str(each.data.get("text/plain", "")) for each in shell.captured.outputs)
    assert text.startswith("Pathways Lab: 2 islands, 8 devices")
    assert "island0" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%%pw_program -p urgent\ny = 1", "invalid choice: 'urgent'"),
        ("%%pw_program --show queue\ny = 1", "no panel is called 'queue'"),
        ("%%pw_program 2x\ny = 1", "must be a Python name"),
        (
            "%%pw_program --nonsense\ny = 1",
            "unrecognized arguments: --nonsense; usage: %%pw_program ",
        ),
        ("%%pw_program --detach\ny = 1", "--detach needs a name to find the run by"),
        (
            "%%pw_program away --detach\ny = double(x)",
            "'kernel-1' is a name that the lab has given",
        ),
        ("%pw_attach", "the following arguments are required: name; usage: %pw_attach"),
        ("%pw_attach nothing", "nothing is published under this name"),
        ("%%pw_program a b\ny = 1", "unrecognized arguments: b; usage: %%pw_program [-p"),
        ("%%pw_program lab\ny = 1", "'lab' cannot be bound: it is a Lab, and a program takes only"),
        ("%%pw_program left\ny = 1", "it is a Slice"),
        ("%%pw_program total\ny = 1", "it is a CompiledFunction"),
        ("%pw_devices foo", "unrecognized arguments: foo; usage: %pw_devices"),
        ("%pw_traceback foo", "unrecognized arguments: foo"),
    ],
)
def test_wrong_options_say_what_is_right(shell: Shell, line: str, message: str) -> None:
    y = shell.ip.user_ns.get("y")
    assert message in shell.fail(line)
    assert isinstance(shell["lab"], pw.Lab)
    assert shell.ip.user_ns.get("y") is y, "nothing was run"


def test_a_cell_in_which_nothing_runs_says_so(shell: Shell) -> None:
    shell.run("%%pw_program idle\nn = 1 + 1")
    assert "idle: nothing in the cell runs on a device" in shell.captured.stdout
    shell.run("%%pw_program idle\nn = double(x)")
    assert "nothing in the cell" not in shell.captured.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%pw_program --pri", ["--priority"]),
        ("%%pw_program train --priority h", ["high"]),
        ("%%pw_program --priority ", ["low", "normal", "high"]),
        ("%%pw_program --show islands,q", ["islands,queues"]),
        ("%%pw_program --no", ["--no-view"]),
        ("%pw_attach train --show islands,q", ["islands,queues"]),
        ("%pw_cluster --platform c", ["cpu"]),
        ("%pw_cluster --ho", ["--hosts"]),
    ],
)
def test_options_are_completed(shell: Shell, line: str, expected: list[str]) -> None:
    found = shell.ip.Completer.completions(line, len(line))
    texts = [line[: c.start] + c.text for c in found if c.type == "option"]
    head = line.rpartition(" ")[0] + " "
    assert sorted(texts) == sorted(head + each for each in expected)


def test_completion_of_the_body_is_left_alone(shell: Shell) -> None:
    cell = "%%pw_program\ny = doub"
    texts = [c.text for c in shell.ip.Completer.completions(cell, len(cell))]
    assert "double" in texts


def test_help_explains_the_options(shell: Shell) -> None:
    magic = shell.ip.find_cell_magic("pw_program")
    assert "--priority" in magic.__doc__
    assert "Capture the cell as one program" in magic.__doc__


def test_a_detached_cell_is_found_again_by_the_next_client(shell: Shell, tmp_path: Any) -> None:
    shell.ip.user_ns["path"] = str(tmp_path / "lab.json")
    shell.run("lab.invite(path)\neve = pw.connect(path, name='eve')")
    shell.run("here = eve.slice(1)\nslow = pw.jit(lambda x: pw.emulated(800)(x + 1), on=here)")
    shell.run("%%pw_program detached --detach\nfound, n = [slow(slow(x))], 3")
    shell.run("eve.close()\ndel found\neve = pw.connect(path, name='eve')\n%pw_attach detached")
    assert "detached: submitted" in shell.captured.stdout
    np.testing.assert_array_equal(shell.run("found[0].result()"), np.arange(8) + 2)

    def told() -> bool:
        """The value comes by itself, and the record of the end with others."""
        shell.run("%pw_attach detached")
        return "detached: finished" in shell.captured.stdout

    until(told)
    shell.run("eve.unpublish('detached')\neve.close()")


def test_unloading_takes_everything_back(lab: Any) -> None:
    jit = jax.jit
    shell = Shell(lab)
    patched = jax.jit
    assert hasattr(pw.PathwaysError, HOOK)
    shell.run("%load_ext pathways_lab")
    shell.run("%unload_ext pathways_lab")
    assert jax.jit is not patched or patched is jit
    assert shell.ip.find_cell_magic("pw_program") is None
    assert "structured_traceback" not in vars(shell.ip.InteractiveTB)
    assert "pathways_lab_options" not in [
        getattr(m, "matcher_identifier", "") for m in shell.ip.Completer.custom_matchers
    ]


def test_the_lab_is_on_the_dashboard_of_its_dask_cluster(lab: Any) -> None:
    """In Dask's menu and list, served below any prefix; about all clients, and none itself."""
    link = lab.dashboard_link

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"{link}/{path}", timeout=60) as answer:
            found: bytes = answer.read()
        return found

    def clients() -> dict[str, Any]:
        return {each["name"]: each for each in json.loads(get("pathways-lab/state"))["clients"]}

    menu = re.findall(r'href="((?:individual-)?pathways[^"]*)"', get("status").decode())
    assert set(menu) == set(PAGES.names)
    listed = json.loads(get("individual-plots.json"))
    assert listed["Pathways Order"] == "/individual-pathways-order"
    assert "Individual Task Stream" in listed, "Dask's own are still there"
    page = get("individual-pathways-queues")
    assert page == get("some/prefix/individual-pathways-queues")
    assert b'src="pathways-lab/dashboard.js"' in page
    assert clients().keys() == {lab.name} == set(lab.clients)
    with pw.Lab(lab.embedded.control, name="bob") as other:
        other.slice((2,), ("d",), island="island1")
        until(lambda: clients().get("bob", {}).get("devices") == 2)
    assert b'"type": "snapshot"' in get("pathways-lab/feed?panels=islands&since=0")
    for wrong in ("feed?panels=secrets", "%2e%2e/x", "nothing", "feed?since=x"):
        with pytest.raises(urllib.error.HTTPError, match=r"40[04]"):
            get(f"pathways-lab/{wrong}")


def test_magics_that_look_start_no_lab_in_place_of_one_that_was_closed(lab: Any) -> None:
    """The last test here: it ends the lab."""
    shell = Shell(lab)
    lab.close()
    try:
        for cell in ("%pw_devices", "%pw_dashboard", "%%pw_program tr\ny = double(x)"):
            assert "the lab is gone: the lab was closed" in shell.fail(cell), cell
        assert not labs.is_running()
    finally:
        shell.run("%unload_ext pathways_lab")


def test_a_lab_from_before_the_extension_closes_in_the_cell_after_it() -> None:
    """A thread of the extension is still importing what draws."""
    script = """
from IPython.core.interactiveshell import InteractiveShell
import pathways_lab as pw
shell = InteractiveShell.instance(colors="nocolor")
lab = shell.user_ns["lab"] = pw.start(1, 1, 1, progress=False)
pids = [pid for group in lab.embedded.pids.values() for pid in group]
for cell in ("%load_ext pathways_lab", "lab.close()"):
    shell.run_cell(cell).raise_error()
print(*pids)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) >= 4
    until(lambda: not any(map(psutil.pid_exists, pids)))
