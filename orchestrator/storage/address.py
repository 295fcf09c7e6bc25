"""Addresses of remote folders and files: s3://bucket/run1, gs://bucket/run1, file:///mnt/run1.

Settings are paths, and ``pathlib`` keeps one slash of two: ``as_url`` puts the other one back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from orchestrator.errors import UserError
from orchestrator.redaction import mask

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)", re.DOTALL)
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f?#*\[\]\\]|::")
"""Characters that an object's name must not have: fsspec gives them a meaning of their own."""


@dataclass(frozen=True)
class _Scheme:
    """A kind of storage: the module that serves it, and the extra that installs the module."""

    module: str
    extra: str = ""


_SCHEMES: Mapping[str, _Scheme] = {
    "file": _Scheme("fsspec"),
    "memory": _Scheme("fsspec"),
    "s3": _Scheme("s3fs", "s3"),
    "gs": _Scheme("gcsfs", "gcs"),
}


def as_url(location: str | Path | None) -> str | None:
    """Return the address that a setting holds; None for a local path."""
    match = _URL.fullmatch(str(location or ""))
    if match is None:
        return None
    # A file's address is absolute: pathlib does not keep a host's name apart from a folder's.
    root = "/" if match["scheme"].lower() == "file" else ""
    return f"{match['scheme'].lower()}://{root}{match['rest'].strip('/')}"


def location_text(location: str | Path) -> str:
    """Return an address or a local path as people write it."""
    return as_url(location) or str(location)


def scheme_of(url: str) -> str:
    return url.partition("://")[0]


def upload_command(folder: Path, url: str) -> str | None:
    """Return the command that copies the files of a local folder to an address; None if there is none."""
    scheme, _, path = url.partition("://")
    source = shlex.quote(str(folder))
    target = shlex.quote(path if scheme == "file" else url)
    commands = {
        "s3": f"aws s3 sync {source} {target}",
        "gs": f"gcloud storage rsync --recursive {source} {target}",
        "file": f"cp -r {source}/. {target}",
    }
    return commands.get(scheme)


def check_address(name: str, location: str | Path | None) -> None:
    """Raise ValueError for an address that a run cannot use. Local paths pass."""
    url = as_url(location)
    if url is None:
        return
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ValueError(f"{name} is {mask(url)}; {scheme}:// is not known here. {_known_schemes()}")
    if find_spec(_SCHEMES[scheme].module) is None:
        raise ValueError(
            f"{name} is {mask(url)}, but {_SCHEMES[scheme].module} is not installed; "
            f"{_install_line(scheme)}. {_known_schemes()}"
        )
    if "@" in rest.partition("/")[0]:
        raise ValueError(
            f"{name} is {mask(url)}; an address must not hold keys or passwords: give them by the "
            "environment or the files of the storage's own tools (see docs/storage.md)"
        )
    parts = rest.strip("/").split("/")
    if _FORBIDDEN.search(rest) or not all(parts) or {".", ".."} & set(parts):
        raise ValueError(
            f"{name} is {mask(url)!r}; plain names were needed between the slashes, "
            "as in s3://bucket/folder/run1"
        )


def refuse_address(name: str, location: str | Path | None) -> None:
    """Raise UserError for an address where only a folder or file of this machine will do."""
    url = as_url(location)
    if url is not None:
        raise UserError(f"{name} is {mask(url)}; a folder on a disk was needed")


def _known_schemes() -> str:
    """Return the schemes that can be used here, and how to install the others."""
    installed = [scheme for scheme, entry in _SCHEMES.items() if find_spec(entry.module) is not None]
    known = f"Installed: {', '.join(f'{scheme}://' for scheme in installed)}"
    missing = [_install_line(scheme) for scheme in _SCHEMES if scheme not in installed]
    return "; ".join([known, *missing])


def _install_line(scheme: str) -> str:
    return f"for {scheme}:// pip install 'expert-orchestrator[{_SCHEMES[scheme].extra}]'"
