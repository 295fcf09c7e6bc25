"""The software bill of materials in CycloneDX's JSON, as ``make sbom`` writes it.

    python -m release.sbom [--extras hf s3] [--out dist/sbom.json]

It lists the packages that this project needs, in the versions that are installed here, with their licences
and with what each of them needs itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from orchestrator.types import VERSION
from release.build import ROOT
from release.dependencies import Dependency, installed, project, project_requirements
from release.licences import is_allowed, licence_of


def bill_of_materials(extras: list[str]) -> dict[str, Any]:
    """Return the document for the project with these extras."""
    requirements = project_requirements(extras)
    dependencies = installed(requirements)
    section = project()
    root = _component(section["name"], VERSION, section["license"]) | {"type": "application"}
    direct = sorted({canonicalize_name(requirement.name) for requirement in requirements})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": [
            _component(name, dependency.version, licence_of(dependency))
            for name, dependency in dependencies.items()
        ],
        "dependencies": [
            {"ref": root["bom-ref"], "dependsOn": _references(direct, dependencies)},
            *(
                {
                    "ref": _reference(name, dependency.version),
                    "dependsOn": _references(sorted(dependency.requires), dependencies),
                }
                for name, dependency in dependencies.items()
            ),
        ],
    }


def _component(name: str, version: str, licence: str) -> dict[str, Any]:
    reference = _reference(name, version)
    # A text that is no SPDX expression may stand in a name only.
    choice = {"expression": licence} if is_allowed(licence) else {"license": {"name": licence or "unknown"}}
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "licenses": [choice],
        "purl": reference,
    }


def _references(names: Sequence[str], dependencies: Mapping[str, Dependency]) -> list[str]:
    return [_reference(name, dependencies[name].version) for name in names]


def _reference(name: str, version: str) -> str:
    """Return the address of a package, which names it in the document too."""
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extras", nargs="*", default=[], help="extras of pyproject.toml")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "sbom.json", help="the file to write")
    arguments = parser.parse_args()
    document = bill_of_materials(arguments.extras)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {len(document['components'])} packages")


if __name__ == "__main__":
    main()
