"""The groups of benchmarks: small, and few of them import from another."""

from __future__ import annotations

import ast

from harness.docs.source_trees import ROOT, imports_of

BENCHMARKS = ROOT / "benchmarks"
MOST_FILES = 10
BETWEEN_GROUPS = {("parallel", "steps"), ("recovery", "planning")}
"""The first imports from the second. All import from ``support.py`` and ``processes.py``."""


def group_of(module: str) -> str:
    """Return the group of ``benchmarks.GROUP.NAME``, or nothing for what is in no group."""
    _, *inner = module.split(".")
    return inner[0] if inner and (BENCHMARKS / inner[0]).is_dir() else ""


def test_groups_import_from_few_others() -> None:
    found = set()
    for path in BENCHMARKS.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for entry in imports_of(module, ast.parse(path.read_text(encoding="utf-8"))):
            if entry.name.startswith("benchmarks."):
                found.add((group_of(module), group_of(entry.name)))
    between = {(importer, imported) for importer, imported in found if imported and importer != imported}
    assert between == BETWEEN_GROUPS


def test_groups_are_small() -> None:
    folders = {path.parent for path in BENCHMARKS.rglob("*.py")}
    sizes = {folder.name: len(list(folder.glob("[!_]*.py"))) for folder in folders}
    assert len(sizes) > 5
    assert {name: size for name, size in sizes.items() if size > MOST_FILES} == {}
