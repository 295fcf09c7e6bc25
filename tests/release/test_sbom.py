"""The bill of materials names every package once, and every package that another one needs."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from packaging.utils import canonicalize_name

from orchestrator.types import VERSION
from release.dependencies import installed, project_requirements
from release.sbom import bill_of_materials

ROOT_REFERENCE = f"pkg:pypi/expert-orchestrator@{VERSION}"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return bill_of_materials([])


def test_it_holds_what_the_project_asks_for_and_what_that_needs(document: dict[str, Any]) -> None:
    names = {component["name"] for component in document["components"]}
    assert {canonicalize_name(requirement.name) for requirement in project_requirements()} <= names
    assert "filelock" in names, "torch needs it, we do not"
    assert "pytest" not in names, "the tests need it, users do not"


def test_every_reference_is_of_one_component(document: dict[str, Any]) -> None:
    references = [component["bom-ref"] for component in document["components"]]
    graph = {entry["ref"]: entry["dependsOn"] for entry in document["dependencies"]}
    assert len(set(references)) == len(references)
    assert set(graph) == {ROOT_REFERENCE, *references}
    assert {reference for targets in graph.values() for reference in targets} <= set(references)


def test_every_component_is_reached_from_the_project(document: dict[str, Any]) -> None:
    graph = {entry["ref"]: entry["dependsOn"] for entry in document["dependencies"]}
    reached: set[str] = set()
    waiting = [ROOT_REFERENCE]
    while waiting:
        reference = waiting.pop()
        if reference not in reached:
            reached.add(reference)
            waiting += graph[reference]
    assert reached == set(graph)


def test_versions_are_those_that_are_installed(document: dict[str, Any]) -> None:
    versions = {component["name"]: component["version"] for component in document["components"]}
    assert versions["numpy"] == numpy.__version__


def test_an_extra_adds_its_packages() -> None:
    names = {component["name"] for component in bill_of_materials(["s3"])["components"]}
    assert "s3fs" in names


def test_a_package_that_is_left_out_takes_along_what_it_alone_needs() -> None:
    everything = installed(project_requirements())
    without = installed(project_requirements(), without=["torch"])
    assert "torch" not in without
    assert "sympy" in everything
    assert "sympy" not in without, "of all packages only torch needs it"
    assert "numpy" in without
