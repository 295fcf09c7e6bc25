"""YAML files with a comment of several lines above them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

_MAX_COLUMNS = 110


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        # Equal parts are written out: people edit these files, and kubectl shows no anchors.
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(comment: Sequence[str], *documents: dict[str, Any]) -> str:
    """Return a YAML file: the lines of the comment, then the documents with their keys in order."""
    texts = [
        yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=_MAX_COLUMNS, allow_unicode=True)
        for content in documents
    ]
    return comment_text(comment) + "---\n".join(texts)


def comment_text(lines: Sequence[str]) -> str:
    """Return lines as a comment. A value with a line break in it must not end the comment."""
    return "".join(f"# {part}".rstrip() + "\n" for line in lines for part in line.splitlines())
