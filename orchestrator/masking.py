"""Secrets out of what is written and shown: values of the environment that are named like one, and passwords in addresses. Pure:
who reads the environment hands the values on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any, TextIO
from urllib.parse import quote, unquote

Secrets = tuple[str, ...]

MASK = "***"
_SHORTEST = 6  # characters; shorter ones are words of every text
_NAMES = re.compile(r".*(PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|CREDENTIALS?|API_?KEY|(^|_)(KEY|KEY_ID|PWD|PAT|PASS|AUTH))", re.IGNORECASE)
# scheme://user:password@host, or with one slash, as a path is written; a password may hold anything but what ends the part of an
# address before its host
_ADDRESS = re.compile(r"(?P<begin>[A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2}[^\s/:@'\"<>]*:)(?P<password>[^\s/@'\"<>]+)(?=@)")
# ?token=…&x-amz-signature=… of an address
_QUERY = re.compile(
    r"(?P<begin>[?&;](?:[A-Za-z0-9_.-]*(?:password|passwd|secret|token|api_?key|signature|credential)|key|sig|pwd)=)(?P<value>[^\s&;#'\"<>]+)",
    re.IGNORECASE,
)


def secrets_of(environment: Mapping[str, str]) -> Secrets:
    """The secrets that an environment holds, and the forms in which they may be written. The longest first: one may hold another."""
    found: set[str] = set()
    for name, value in environment.items():
        if _NAMES.fullmatch(name) and name != "PWD":
            found |= {value, value.strip()}
        found |= {unquote(match["password"]) for match in _ADDRESS.finditer(value)}
    forms = {form for value in found for form in _forms(value)}
    return tuple(sorted((form for form in forms if len(form) >= _SHORTEST), key=lambda form: (-len(form), form)))


def _forms(value: str) -> set[str]:
    """As it is, and as JSON, Python, HTML and an address would write it; of several lines, each long one by itself."""
    lines = [line for line in value.splitlines() if len(line) >= 16] if "\n" in value.strip() else []
    return {
        written
        for plain in (value, *lines)
        for written in (plain, json.dumps(plain)[1:-1], repr(plain)[1:-1], escape(plain), quote(plain), quote(plain, safe=""))
    }


def mask(text: str, secrets: Secrets = ()) -> str:
    """The text without the secrets, and without passwords in addresses."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    if ":/" in text:
        text = _ADDRESS.sub(rf"\g<begin>{MASK}", text)
    if "=" in text and ("?" in text or "&" in text):
        text = _QUERY.sub(rf"\g<begin>{MASK}", text)
    return text


def masked(value: Any, secrets: Secrets = ()) -> Any:
    """A tree of plain values with its texts masked, its keys too. Numbers stay what they are."""
    if isinstance(value, str):
        return mask(value, secrets)
    if isinstance(value, Mapping):
        return {masked(key, secrets): masked(inner, secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, secrets) for inner in value]
    return value


def mask_error(error: BaseException, secrets: Secrets) -> None:
    """What an error says, and what those say that led to it, masked in place: it keeps its class and its traceback."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        one.args = tuple(mask(part, secrets) if isinstance(part, str) else part for part in one.args)
        notes = getattr(one, "__notes__", None)
        if notes:
            one.__notes__ = [mask(str(note), secrets) for note in notes]


class MaskedStream:
    """A text stream that masks what is written to it, and is the stream it stands for in all else."""

    def __init__(self, stream: TextIO, secrets: Secrets) -> None:
        self._stream, self._secrets = stream, secrets

    def write(self, text: str) -> int:
        self._stream.write(mask(text, self._secrets))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
