"""The packages that read each setting, found in the sources."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from harness.docs.documents import ROOT
from orchestrator.config.settings import section_types


def find_readers() -> dict[str, list[str]]:
    """Return the packages that read each setting, by its flat name.

    A read is an attribute ``config.section.name``, or ``section.name`` where a function is given
    its section. Where no module reads a setting so, every attribute and every string of that name
    counts, and every call of a method of the section that reads it.
    """
    sections = {field.name: section for section, kind in section_types().items() for field in fields(kind)}
    methods = _methods_that_read()
    direct: dict[str, set[str]] = {name: set() for name in [*sections, "task"]}
    indirect: dict[str, set[str]] = {name: set() for name in direct}
    for path, tree in _modules():
        for node in ast.walk(tree):
            name = _name_read(node)
            if name in direct:
                of_section = isinstance(node, ast.Attribute) and _last_name(node.value) == sections.get(
                    name, "config"
                )
                (direct if of_section else indirect)[name].add(_package(path))
            for setting in methods.get(name or "", ()):
                indirect[setting].add(_package(path))
    return {name: sorted(packages or indirect[name]) for name, packages in direct.items()}


def _methods_that_read() -> dict[str, list[str]]:
    """Return the settings that the methods of their sections read, by the name of the method."""
    found: dict[str, list[str]] = {}
    for kind in section_types().values():
        names = {field.name for field in fields(kind)}
        tree = ast.parse(inspect.getsource(kind))
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name != "__post_init__":
                read = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
                found[method.name] = sorted(read & names)
    return found


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "orchestrator").rglob("*.py")):
        relative = path.relative_to(ROOT / "orchestrator")
        if relative.parts[0] != "config":
            yield relative, ast.parse(path.read_text(encoding="utf-8"))


def _package(path: Path) -> str:
    """Return the folder of a module, or its own name at the top: ``trainer``."""
    return path.parent.as_posix() if len(path.parts) > 1 else path.stem


def _name_read(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        # Of torch: ``finfo(dtype).eps`` is no setting.
        of_call = isinstance(node.value, ast.Call) and _last_name(node.value.func) == "finfo"
        return None if of_call else node.attr
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
