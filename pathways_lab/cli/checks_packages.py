"""Checks of the installed packages: versions, wheels that load, accelerator plugins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from pathways_lab.cli.finding import Finding

DISTRIBUTION = "pathways-lab"
IMPORT_NAMES = {"pillow": "PIL", "ipython": "IPython"}
"""Where the module is not called like the distribution."""

PROBE = """
import importlib, json, sys
for name in sys.argv[1:]:
    print(json.dumps([name, "importing"]), flush=True)
    try:
        module = importlib.import_module(name)
        if name == "jax":
            module.jit(lambda x: x + 1)(1).block_until_ready()
        print(json.dumps([name, "ok"]), flush=True)
    except BaseException as error:
        print(json.dumps([name, f"{type(error).__name__}: {error}"]), flush=True)
"""
"""Runs in a process of its own: a wheel for another processor does not raise, it kills."""


def required() -> list[str]:
    """Base requirements of the installed distribution, as text (``"jax>=0.10"``)."""
    texts = metadata.requires(DISTRIBUTION) or []
    return [text for text in texts if "extra ==" not in text]


def distribution_name(requirement: str) -> str:
    """``"jax>=0.10"`` to ``"jax"``."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), None)
    return requirement[:end]


def requirements() -> Iterator[Finding]:
    """Every base requirement is installed in a version that it allows."""
    try:
        texts = required()
    except metadata.PackageNotFoundError:
        yield Finding(
            "FAIL",
            f"{DISTRIBUTION} is not installed in {sys.prefix}",
            f"{sys.executable} -m pip install -e '.[notebook]' (in the checkout)",
        )
        return
    bad = []
    for text in texts:
        name = distribution_name(text)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            bad.append((f"{text}: not installed", text))
            continue
        if not allowed(text, version):
            bad.append((f"{text}: {version} is installed", text))
    for what, text in bad:
        yield Finding("FAIL", what, f"{sys.executable} -m pip install '{text}'")
    if not bad:
        yield Finding(
            "ok",
            f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}: "
            f"{len(texts)} packages in versions that fit",
        )


def allowed(requirement: str, version: str) -> bool:
    """Whether *requirement* admits *version*; true when that cannot be judged."""
    if util.find_spec("packaging") is None:
        return True
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


def imports() -> Iterator[Finding]:
    """Every base package can be imported, and JAX computes."""
    names = []
    try:
        texts = required()
    except metadata.PackageNotFoundError:
        return  # said already
    for text in texts:
        name = distribution_name(text)
        names.append(IMPORT_NAMES.get(name, name))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    states = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    bad = {name: state for name, state in states.items() if state != "ok"}
    for name, state in bad.items():
        if state == "importing":
            yield killed(name, done.returncode)
        else:
            yield Finding(
                "FAIL",
                f"import {name}: {state}",
                f"{sys.executable} -m pip install --force-reinstall {name}",
            )
    if not bad:
        yield Finding(
            "ok", f"all of them can be imported, and JAX {metadata.version('jax')} computes"
        )


def killed(name: str, status: int) -> Finding:
    """The finding about a package whose import ended the process."""
    if -status == signal.SIGILL:
        return Finding(
            "FAIL",
            f"import {name}: illegal instruction",
            "the wheel needs processor instructions (AVX on x86_64) that this machine, or its "
            "emulation, lacks: use a native Python or another machine",
        )
    return Finding(
        "FAIL",
        f"import {name}: the process ended with status {status}",
        f"{sys.executable} -m pip install --force-reinstall {name}",
    )


def accelerators() -> Iterator[Finding]:
    """Accelerators that are there and JAX plugins that would use them."""
    gpu = Path("/dev/nvidiactl").exists()
    plugin = next((n for n in ("13", "12") if util.find_spec(f"jax_cuda{n}_plugin")), None)
    if gpu and plugin is None:
        yield Finding(
            "note",
            "accelerators: an NVIDIA GPU is here, JAX has no plugin for it and will use the CPU",
            f"{sys.executable} -m pip install 'jax[cuda13]'",
        )
    elif gpu:
        yield Finding("ok", f"accelerators: an NVIDIA GPU, JAX with CUDA {plugin}")
    elif any(Path("/dev").glob("accel*")) and util.find_spec("libtpu") is None:
        yield Finding(
            "note",
            "accelerators: a TPU seems to be here, JAX has no plugin for it and will use the CPU",
            f"{sys.executable} -m pip install 'jax[tpu]'",
        )
    else:
        yield Finding("ok", "accelerators: none needed; devices will be JAX CPU devices")
