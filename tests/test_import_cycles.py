"""Tests that no modules and no sub-packages import each other in a cycle.

Imports inside functions and under ``TYPE_CHECKING`` count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from harness.docs.source_trees import MODULES, Import, all_imports, is_within


def package_of(module: str) -> str:
    """The package or sub-package of a module, which the rule about sub-packages compares."""
    return (
        module if module in MODULES and MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    )


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """One cycle of a directed graph; empty when there is none."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for following in sorted(edges.get(name, ())):
                if found := visit(following, (*path, name)):
                    return found
            done.add(name)
        return []

    for name in sorted(edges):
        if found := visit(name, ()):
            return found
    return []


def edges_between(imports: Iterable[Import], unit: Callable[[str], str]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for entry in imports:
        if entry.name not in MODULES or entry.importer == "orchestrator":
            continue
        importer, imported = unit(entry.importer), unit(entry.name)
        if importer != imported:
            edges.setdefault(importer, set()).add(imported)
    return edges


def test_no_module_is_in_an_import_cycle() -> None:
    assert not find_cycle(edges_between(all_imports(), lambda module: module))


@pytest.mark.parametrize(
    "package", ["config", "record", "report", "live", "plan", "train", "measure", "runtime"]
)
def test_no_sub_package_is_in_an_import_cycle(package: str) -> None:
    """Sub-packages of one package import each other in one direction. The package's own modules
    may stand between them."""
    prefix = f"orchestrator.{package}"

    def unit(module: str) -> str:
        parent = package_of(module)
        return parent if is_within(module, [prefix]) and parent != prefix else module

    inside = [e for e in all_imports() if is_within(e.importer, [prefix]) and is_within(e.name, [prefix])]
    assert not find_cycle(edges_between(inside, unit))


def test_a_planted_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert not find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
