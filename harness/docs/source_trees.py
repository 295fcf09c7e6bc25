"""Syntax trees of the modules of ``orchestrator`` and ``experts``, and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRIVATE_RAY = ("ray._private", "ray._raylet", "ray._common", "ray.core.generated", "ray.train.v2._internal")


@dataclass(frozen=True)
class Import:
    """One import of a module: ``late`` inside a function, ``typing_only`` under ``TYPE_CHECKING``."""

    importer: str
    name: str
    late: bool = False
    typing_only: bool = False

    def __str__(self) -> str:
        return f"{self.importer} imports {self.name}"


def find_modules() -> dict[str, Path]:
    """Return the path of each module by its dotted name."""
    found = {}
    for package in ("orchestrator", "experts"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    assert found, f"no modules below {ROOT}: every rule would hold"
    return found


MODULES = find_modules()


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module. Parsing takes seconds: no test is collected with it."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports_of(module: str, tree: ast.AST, late: bool = False, typing_only: bool = False) -> Iterator[Import]:
    """Yield the imports in a tree of a module, those of nested statements included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, late, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                # `from ray import _private` names a private module as well as `from ray._private
                # import x` does.
                is_module = full_name in MODULES or full_name.startswith(PRIVATE_RAY)
                yield Import(module, full_name if is_module else str(node.module), late, typing_only)
        else:
            in_function = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            in_type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from imports_of(module, node, in_function, typing_only or in_type_checking)


@cache
def all_imports() -> list[Import]:
    """Return the imports of all modules."""
    return [entry for name, tree in trees().items() for entry in imports_of(name, tree)]


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these modules or packages, or lies below one."""
    return any(module == package or module.startswith(package + ".") for package in packages)
