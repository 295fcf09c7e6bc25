"""Size of the distributions and of an installed environment, and times of imports and of ``--help``.

    python -m benchmarks.startup.install [--rounds 5] [--out FILE]

Sizes are those of the files that pip lists for a package and for everything that it needs, without compiled
bytecode. Times are of whole processes from start to end, with compiled bytecode; rounds alternate. Other
trainers are measured where they are installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from release.build import build
from release.dependencies import Dependency, installed, project_requirements

TORCH = ("torch",)
LARGEST = 8
PEERS = ("accelerate", "lightning")


@dataclass(frozen=True)
class Start:
    """A process that is timed: what it is, and its command."""

    name: str
    command: tuple[str, ...]
    needs: str = "orchestrator"
    """The package without which it is left out."""


def _imports(statement: str, needs: str = "orchestrator") -> Start:
    return Start(f"`{statement}`", (sys.executable, "-c", statement), needs)


def _program(arguments: str, module: str, needs: str = "orchestrator") -> Start:
    return Start(f"`{arguments}`", (sys.executable, "-m", module, *arguments.split()[1:]), needs)


STARTS = (
    Start("an empty program", (sys.executable, "-c", "pass")),
    _imports("import orchestrator"),
    _imports("import experts"),
    _program("orchestrator --help", "orchestrator"),
    _program("orchestrator train --help", "orchestrator"),
    _imports("import torch"),
    _imports("import ray"),
    _imports("from experts.moe.layer import MoELayer"),
    _imports("from orchestrator import Trainer"),
    _imports("from accelerate import Accelerator", "accelerate"),
    _program("accelerate --help", "accelerate.commands.accelerate_cli", "accelerate"),
    _program("accelerate launch --help", "accelerate.commands.accelerate_cli", "accelerate"),
    _imports("from lightning import Trainer", "lightning"),
)


def size_bytes(dependencies: Iterable[Dependency]) -> int:
    """Add up the files of packages, compiled bytecode left out: pip writes it or not."""
    return sum(_package_bytes(dependency) for dependency in dependencies)


def _package_bytes(dependency: Dependency) -> int:
    files = dependency.distribution.files or []
    paths = [Path(str(file.locate())) for file in files if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file())


def size_rows() -> list[list[object]]:
    """Return the sizes of our distributions, and of environments with and without torch."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder))
        rows: list[list[object]] = [
            ["wheel", 1, _megabytes(built.wheel.stat().st_size)],
            ["source distribution", 1, _megabytes(built.sdist.stat().st_size)],
        ]
    environments: Mapping[str, Sequence[Requirement]] = {
        "dependencies of orchestrator": project_requirements(),
        "dependencies with the extras hf and s3": project_requirements(["hf", "s3"]),
        **{f"{peer} with its dependencies": [Requirement(peer)] for peer in PEERS if _is_installed(peer)},
    }
    for name, requirements in environments.items():
        everything = installed(requirements)
        without = installed(requirements, without=TORCH)
        rows.append([name, len(everything), _megabytes(size_bytes(everything.values()))])
        rows.append([f"{name}, without torch", len(without), _megabytes(size_bytes(without.values()))])
    return rows


def largest_rows() -> list[list[object]]:
    """Return the packages that take most of the space."""
    dependencies = installed(project_requirements()).values()
    sizes = sorted(((_package_bytes(each), each) for each in dependencies), key=lambda pair: -pair[0])
    return [[each.name, each.version, _megabytes(size)] for size, each in sizes[:LARGEST]]


def time_rows(rounds: int) -> list[list[object]]:
    """Time each process in every round, so that a busy moment meets all of them."""
    starts = [start for start in STARTS if _is_installed(start.needs)]
    seconds: dict[str, list[float]] = {start.name: [] for start in starts}
    with tempfile.TemporaryDirectory() as folder:
        for start in starts:
            _seconds(start, folder)  # compiles the bytecode, and brings the files into memory
        for _ in range(rounds):
            for start in starts:
                seconds[start.name].append(_seconds(start, folder))
    return [
        [name, f"{statistics.median(found):.2f}", f"{min(found):.2f}–{max(found):.2f}"]
        for name, found in seconds.items()
    ]


def _seconds(start: Start, folder: str) -> float:
    started = time.perf_counter()
    subprocess.run(start.command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - started


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times that each process is started")
    arguments = parser.parse_args()
    text = header("Installation: sizes and import times", arguments)
    text += markdown_table(["size", "packages", "MB"], size_rows())
    text += "\n" + markdown_table(["largest packages", "version", "MB"], largest_rows())
    text += "\n" + markdown_table(["process", "median s", "range"], time_rows(arguments.rounds))
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
