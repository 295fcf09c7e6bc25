"""The licences of the packages that this project needs, as ``make licences`` lists them.

    python -m release.licences [--extras hf s3]

A package whose licence is unknown, or not among those that the project allows, is named, and the exit code
is 1. The licence is the expression of the package's metadata, or else its classifiers, or else its text.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable

from release.dependencies import Dependency, installed, project_requirements

EXTRAS = ("dev",)
"""The extras that are checked: ``dev`` holds those of users too."""

ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Zlib",
        "LicenseRef-NVIDIA",
    }
)
"""Licences that let this project be used and changed under its own. MPL-2.0 binds changes of the package's
own files only. The libraries of CUDA are NVIDIA's: pip installs them beside torch, we pass nothing on."""

_WORDS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""What metadata say, as an SPDX name. A BSD licence without a number may be any of two, both allowed."""

_NO_LICENCE = ("OSI Approved", "DFSG approved")
"""Classifiers that name no licence."""

_BY_FILE = {
    "huey": "MIT",
    "skops": "MIT",
}
"""Packages whose metadata say nothing, with the licence of the file that they bring."""

_OPERATOR = re.compile(r"\s+(?:AND|OR)\s+|[()]")


def licence_of(dependency: Dependency) -> str:
    """Return the licence of a package as an SPDX expression; empty if its metadata do not say."""
    text = "".join(_lines(dependency, "License")).strip()
    licence = (
        "".join(_lines(dependency, "License-Expression"))
        or _from_classifiers(_lines(dependency, "Classifier"))
        or _WORDS.get(text, text)
        or _BY_FILE.get(dependency.name, "")
    )
    is_cuda = dependency.name.startswith(("nvidia-", "cuda-"))
    return "LicenseRef-NVIDIA" if is_cuda and not is_allowed(licence) else licence


def _lines(dependency: Dependency, field: str) -> list[str]:
    """Return all values that the metadata of a package have for a field."""
    return dependency.distribution.metadata.get_all(field) or []


def _from_classifiers(classifiers: Iterable[str]) -> str:
    """Join the licences of classifiers; one that is not known stays as it is, and is refused."""
    words = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License :: ")]
    return " AND ".join(_WORDS.get(word, word) for word in words if word not in _NO_LICENCE)


def is_allowed(expression: str) -> bool:
    """Report whether every part of an expression is allowed.

    Of ``A OR B`` one would do; so far both are.
    """
    parts = [part.partition(" WITH ")[0].strip() for part in _OPERATOR.split(expression)]
    return all(part in ALLOWED for part in parts if part) and any(parts)


def refused(dependencies: Iterable[Dependency]) -> list[str]:
    """Return a line for each package whose licence is unknown or not allowed."""
    lines = []
    for dependency in dependencies:
        licence = licence_of(dependency)
        if not is_allowed(licence):
            lines.append(f"{dependency.name} {dependency.version}: {_shown(licence)}")
    return lines


def _shown(licence: str) -> str:
    """Return the first line of a licence: some metadata hold its whole text."""
    return licence.splitlines()[0][:100] if licence else "no licence in its metadata"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extras", nargs="*", default=EXTRAS, help="extras of pyproject.toml")
    dependencies = installed(project_requirements(parser.parse_args().extras)).values()
    for dependency in dependencies:
        print(f"{dependency.name:40} {dependency.version:16} {_shown(licence_of(dependency))}")
    wrong = refused(dependencies)
    for line in wrong:
        print(f"not allowed: {line}; see ALLOWED in release/licences.py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
