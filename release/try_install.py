"""Install the wheel and the source distribution into new environments, and run them in an empty folder.

    python -m release.try_install --pythons python3.11 python3.12

Each Python gets an environment of its own, with the versions of constraints.txt: pip downloads what it does
not have. Nothing of this repository is on the path of the commands.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

from orchestrator.types import VERSION
from release.build import ROOT, Distributions, build

SIZES = "--width 16 --expert-hidden-size 16 --experts 3 --layers 1"
COMMANDS = (
    ("orchestrator --version", f"expert-orchestrator {VERSION}"),
    ("orchestrator --help", "usage: orchestrator VERB"),
    ("orchestrator launch slurm --workers 2", "#SBATCH --nodes=2"),
    ("orchestrator launch ssh --workers 2 --hosts a,b", "a b"),
    ("orchestrator launch skypilot --workers 2 --gpus-per-node 0 --storage nfs:/runs", "num_nodes: 2"),
    (f"orchestrator train {SIZES} --max-steps 5 --run-dir run --trackers", "run"),
)
"""Commands of an installed package, with words of their output."""

_IMPORTS = "import orchestrator, experts; print(orchestrator.__file__, experts.__file__)"


def check_commands(environment: Path, folder: Path) -> None:
    """Run the commands of an environment in a folder. Raises at the first one that fails."""
    places = _run([str(environment / "bin" / "python"), "-c", _IMPORTS], folder).split()
    foreign = [place for place in places if not Path(place).is_relative_to(environment)]
    if foreign:
        raise RuntimeError(f"imported from outside of {environment}: {', '.join(foreign)}")
    for command, words in COMMANDS:
        program, *arguments = command.split()
        output = _run([str(environment / "bin" / program), *arguments], folder)
        if words not in output:
            raise RuntimeError(f"{command!r} printed no {words!r}:\n{output}")
    if not (folder / "run" / "report.html").is_file():
        raise RuntimeError(f"the run wrote no report.html; {folder}/run has {os.listdir(folder / 'run')}")


def try_install(python: str, distributions: Distributions, folder: Path) -> None:
    """Install both distributions for one Python, one after the other, and run each."""
    environment = folder / "environment"
    _run([python, "-m", "venv", str(environment)], folder)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--no-compile"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    for file in (distributions.wheel, distributions.sdist):
        started = time.monotonic()
        # The dependencies are those of the wheel; only the project itself is installed again.
        again = ["--force-reinstall", "--no-deps"] if file == distributions.sdist else []
        _run([*pip, *again, *constraints, str(file)], folder)
        empty = folder / f"outside-{file.suffix[1:]}"
        empty.mkdir()
        check_commands(environment, empty)
        print(f"{python}: {file.name} installed and ran in {time.monotonic() - started:.0f} s", flush=True)


def _run(command: list[str], folder: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stdout}{finished.stderr}")
    return finished.stdout + finished.stderr


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=["python3"], help="the Pythons to install for")
    pythons = parser.parse_args().pythons
    with tempfile.TemporaryDirectory() as built:
        distributions = build(Path(built))
        for python in pythons:
            with tempfile.TemporaryDirectory() as folder:
                try_install(python, distributions, Path(folder))


if __name__ == "__main__":
    main()
