"""The packages that this project needs, as they are installed here."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.build import ROOT


@dataclass(frozen=True)
class Dependency:
    """An installed package, with the names of those that it needs itself."""

    name: str
    distribution: Distribution
    requires: frozenset[str]

    @property
    def version(self) -> str:
        return self.distribution.version


def project() -> dict[str, Any]:
    """Return the section ``project`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def project_requirements(extras: Iterable[str] = ()) -> list[Requirement]:
    """Return what the project asks for itself, with these extras and those that they name."""
    section = project()
    texts = list(section["dependencies"])
    for extra in extras:
        texts += section["optional-dependencies"][extra]
    requirements = [Requirement(text) for text in texts]
    own = [requirement for requirement in requirements if requirement.name == section["name"]]
    others = [requirement for requirement in requirements if requirement.name != section["name"]]
    nested = [extra for requirement in own for extra in requirement.extras]
    return [*others, *(project_requirements(nested) if nested else [])]


def installed(requirements: Iterable[Requirement], without: Collection[str] = ()) -> dict[str, Dependency]:
    """Return the packages that requirements lead to, by name; those of ``without`` are not followed."""
    found: dict[str, Dependency] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(requirement, "this project") for requirement in requirements]
    while waiting:
        requirement, parent = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if name in without or (name, extras) in seen:
            continue
        seen.add((name, extras))
        package = _distribution(name, parent)
        needed = _needed(package, extras)
        known = found[name].requires if name in found else frozenset()
        requires = known | {canonicalize_name(other.name) for other in needed}
        found[name] = Dependency(name, package, requires)
        waiting += [(other, name) for other in needed]
    return dict(sorted(found.items()))


def _distribution(name: str, parent: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed, and {parent} needs it; run 'make check' first") from None


def _needed(package: Distribution, extras: frozenset[str]) -> list[Requirement]:
    """Return the requirements of a package that apply to this Python and machine."""
    requirements = [Requirement(text) for text in package.requires or ()]
    return [requirement for requirement in requirements if _applies(requirement, extras)]


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""})
