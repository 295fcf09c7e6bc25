"""Licences of dependencies are known and allowed; one that is not is named."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from release.dependencies import Dependency, installed, project_requirements
from release.licences import EXTRAS, is_allowed, licence_of, refused


def dependency(folder: Path, name: str, *lines: str) -> Dependency:
    (folder / "METADATA").write_text(
        "\n".join(["Version: 1.0", f"Name: {name}", *lines, ""]), encoding="utf-8"
    )
    return Dependency(name, PathDistribution(folder), frozenset())


def test_every_dependency_has_an_allowed_licence() -> None:
    assert refused(installed(project_requirements(EXTRAS)).values()) == []


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        (["License-Expression: MIT OR Apache-2.0", "License: something"], "MIT OR Apache-2.0"),
        (["Classifier: License :: OSI Approved :: BSD License", "License: text"], "BSD-3-Clause"),
        (["Classifier: License :: OSI Approved", "License: Apache 2.0"], "Apache-2.0"),
        (["License: MIT"], "MIT"),
        ([], ""),
    ],
)
def test_the_licence_is_found_in_expression_classifiers_and_text(
    tmp_path: Path, lines: list[str], licence: str
) -> None:
    assert licence_of(dependency(tmp_path, "some", *lines)) == licence


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["License-Expression: GPL-3.0-or-later"], "GPL-3.0-or-later"),
        (["License-Expression: MIT AND AGPL-3.0-only"], "MIT AND AGPL-3.0-only"),
        (
            [
                "Classifier: License :: OSI Approved :: MIT License",
                "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
            ],
            "MIT AND GNU General Public License v3 (GPLv3)",
        ),
        ([], "no licence in its metadata"),
    ],
)
def test_a_licence_that_is_unknown_or_not_allowed_is_refused_with_its_name(
    tmp_path: Path, lines: list[str], shown: str
) -> None:
    assert refused([dependency(tmp_path, "some", *lines)]) == [f"some 1.0: {shown}"]


def test_libraries_of_cuda_are_nvidias(tmp_path: Path) -> None:
    """They come with the torch of GPUs, and say so in several ways."""
    found = dependency(tmp_path, "nvidia-cublas", "License: LicenseRef-NVIDIA-Proprietary")
    assert licence_of(found) == "LicenseRef-NVIDIA"
    assert refused([found]) == []


@pytest.mark.parametrize("expression", ["", "MIT GPL", "(MIT OR GPL-2.0-only) AND ISC"])
def test_every_part_of_an_expression_counts(expression: str) -> None:
    assert not is_allowed(expression)
    assert is_allowed("(MIT OR Apache-2.0 WITH LLVM-exception) AND ISC")
