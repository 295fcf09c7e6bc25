"""The size of installed packages, on one that is made by hand."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path

from benchmarks.startup.install import size_bytes
from release.dependencies import Dependency


def test_files_count_without_bytecode_and_without_those_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "module.py").write_bytes(b"x" * 100)
    (tmp_path / "some" / "library.so").write_bytes(b"x" * 1000)
    (tmp_path / "some" / "module.cpython-311.pyc").write_bytes(b"x" * 10_000)
    (tmp_path / "other.py").write_bytes(b"x" * 5)  # of another package
    files = ["some/module.py", "some/library.so", "some/module.cpython-311.pyc", "some/removed.py"]
    information = tmp_path / "some-1.0.dist-info"
    information.mkdir()
    (information / "RECORD").write_text("".join(f"{name},,\n" for name in files), encoding="utf-8")
    package = Dependency("some", PathDistribution(information), frozenset())
    assert size_bytes([package]) == 1100
    assert size_bytes([package, package]) == 2200
