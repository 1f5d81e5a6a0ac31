"""The command line: ``python -m pathways_lab lab | demo | run | stop | doctor | cluster``.

Problem: the first command that somebody runs must either work or say in one
sentence what to do.  So the command line itself needs nothing but the standard
library until it knows that the rest is there.

Rule for maintainers: the top layer.  It may import every other one, nobody
imports it; module-level imports are the standard library and this folder, so
that ``doctor`` runs where JAX or Jupyter are broken.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pathways_lab.cli import cluster, platforms

DESCRIPTION = "One notebook drives many accelerators as one machine."
EPILOG = "Help for one command: python -m pathways_lab COMMAND --help"


def parser() -> argparse.ArgumentParser:
    """The grammar of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m pathways_lab", description=DESCRIPTION, epilog=EPILOG
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    lab = commands.add_parser(
        "lab",
        help="start JupyterLab with the quickstart open",
        description="Copy the notebooks into a folder of yours and open the quickstart in "
        "JupyterLab. Copies that are there already are kept. Options that are not listed here "
        "go to JupyterLab, for example --no-browser or --port=9000.",
    )
    lab.add_argument(
        "--folder",
        type=Path,
        default=Path("lab-notebooks"),
        help="where the copies go (default: %(default)s)",
    )
    lab.add_argument(
        "--fresh",
        action="store_true",
        help="take the notebooks as shipped; copies that differ are kept under another name",
    )
    lab.add_argument(
        "--in-place",
        action="store_true",
        help="open the shipped notebooks themselves, for working on them in a checkout",
    )

    demo = commands.add_parser(
        "demo",
        help="run the quickstart without a browser",
        description="Execute a notebook from top to bottom and leave it with its outputs.",
    )
    demo.add_argument("--notebook", default="00_quickstart.ipynb", help="default: %(default)s")
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("build", "demo"),
        help="folder for the executed notebook (default: %(default)s)",
    )

    script = commands.add_parser(
        "run",
        help="run a script that only imports JAX on a lab",
        description="Run a Python script, unchanged, whose jax.devices() are the devices of a lab: "
        "one that is started for it, or the one of a lab file.",
    )
    script.add_argument("--islands", type=int, default=1, help="default: %(default)s")
    script.add_argument("--hosts-per-island", type=int)
    script.add_argument("--devices-per-host", type=int)
    script.add_argument(
        "--memory",
        help="bytes per device that the script may use, or text like 4GiB"
        " (default: a share of what is free)",
    )
    script.add_argument("--lab", type=Path, help="a lab file, of a lab that runs already")
    script.add_argument("--name", default="", help="what the script is called on the lab")
    script.add_argument(
        "--slice-index",
        action="store_true",
        help="give devices the number of their island, for mesh_utils.create_hybrid_device_mesh",
    )
    script.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        help="a module and its arguments, instead of a script",
    )
    script.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")

    stop = commands.add_parser(
        "stop",
        help="end a lab that outlives its kernels",
        description="End a lab that pw.start(keep=NAME) has started, with everything that is kept "
        "on it. `doctor` lists those that run.",
    )
    stop.add_argument("name", help="the name under which it is kept")

    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or a cluster, and say what to do",
        description="One line for each thing that the lab needs: its state, what it is, what to "
        "do. The exit status is 1 when something is missing without which the lab cannot run.",
    )
    doctor.add_argument(
        "address",
        nargs="?",
        help="of a Dask scheduler, MACHINE or MACHINE:PORT: check its machines, and what lies "
        "between them",
    )
    cluster.certified(doctor)
    cluster.add_to(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 good, 1 failed, 2 wrong usage)."""
    options, rest = parser().parse_known_args(arguments)
    if rest and options.command != "lab":
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "doctor":
        from pathways_lab.cli import doctor

        if options.address is None:
            return doctor.run()
        return cluster.examine(options)
    if refusal := platforms.refusal(platforms.this_machine()):
        print(f"Pathways Lab does not run here: {refusal}")
        return 1
    if options.command == "cluster":
        return cluster.run(options)
    if options.command == "stop":
        from pathways_lab.cli import stop

        return stop.run(options.name)
    if options.command == "demo":
        from pathways_lab.cli import demo

        return demo.run(options.notebook, options.output)
    if options.command == "run":
        command = ["-m", *options.module] if options.module else options.script
        if not command:
            parser().error("run: which script?  python -m pathways_lab run script.py")
        from pathways_lab.cli import run

        return run.run(
            command,
            options.islands,
            options.hosts_per_island,
            options.devices_per_host,
            options.memory,
            options.lab,
            options.name,
            options.slice_index,
        )
    from pathways_lab.cli import jupyter

    return jupyter.run(options.folder, options.fresh, options.in_place, rest)
