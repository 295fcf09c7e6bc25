"""Secrets out of what is written and shown: values of the environment that are named like one, and passwords in addresses. Pure:
who reads the environment hands the values on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from html import escape
from typing import Any, TextIO, cast
from urllib.parse import quote, unquote

Secrets = tuple[str, ...]

MASK = "***"
_SHORTEST = 6  # characters; shorter ones are words of every text
_NAMES = re.compile(
    r".*(PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|CREDENTIALS?|(API|ACCESS|ACCOUNT)_?KEY|CONNECTION_STRING"
    r"|(^|_)(KEY|KEY_ID|SECRET_KEY_BASE|PWD|PAT|PASS|AUTH|JWT|DSN|COOKIE|WEBHOOK|WEBHOOK_URL))"
    r"(_?\d+|_(PROD|PRODUCTION|STAGING|DEV|TEST|LIVE|MAIN|OLD|NEW))?",
    re.IGNORECASE,
)
# scheme://user:password@host, or with one slash, as a path is written; a password may hold anything but what ends the part of an
# address before its host, and so an @ too: the last one ends it
_ADDRESS = re.compile(
    r"(?P<begin>[A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2}[^\s/:@'\"<>]*:)(?P<password>[^\s/'\"<>]+)(?=@)"
)
# ?token=…&x-amz-signature=… of an address, and ;AccountKey=… of what databases and stores are opened with
_QUERY = re.compile(
    r"(?P<begin>[?&;](?:[A-Za-z0-9_.-]*(?:password|passwd|secret|token|(?:api|access|account)_?key|signature|credential)|key|sig|pwd)=)"
    r"(?P<value>[^\s&;#'\"<>]+)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(?P<begin>authorization['\"]?\s*[:=]\s*b?['\"]?(?:bearer|basic|token)\s+)(?P<value>[^\s,;'\"<>]+)",
    re.IGNORECASE,
)


def secrets_of(environment: Mapping[str, str]) -> Secrets:
    """The secrets that an environment holds, and the forms in which they may be written. The longest first: one may hold another."""
    found: set[str] = set()
    for name, value in environment.items():
        if _NAMES.fullmatch(name) and name != "PWD":
            found |= {value, value.strip()}
        found |= {unquote(match["password"]) for match in _ADDRESS.finditer(value)}
    return longest_first(form for value in found for form in _forms(value))


def longest_first(*several: Iterable[str]) -> Secrets:
    """All of them, the longest first."""
    forms = {form for forms in several for form in forms if len(form) >= _SHORTEST}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def secrets_in(tree: Any, secrets: Secrets) -> Secrets:
    """Those of the secrets that the texts of a tree hold, in all their forms. Whoever is given the tree has them already."""
    text = "\n".join(_texts(tree))
    return longest_first(form for secret in secrets if secret in text for form in _forms(secret))


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for inner in (*tree, *tree.values()) if isinstance(tree, Mapping) else tree:
            yield from _texts(inner)


def _forms(value: str) -> set[str]:
    """As it is, and as JSON, Python, HTML, an address and a shell would write it; of several lines, each long one by itself."""
    lines = [line for line in value.splitlines() if len(line) >= 16] if "\n" in value.strip() else []
    return {
        written
        for plain in (value, *lines)
        for written in (
            plain,
            json.dumps(plain)[1:-1],
            json.dumps(plain, ensure_ascii=False)[1:-1],
            repr(plain)[1:-1],
            *_quoted(plain),
        )
    }


def _quoted(plain: str) -> tuple[str, ...]:
    return escape(plain), quote(plain), quote(plain, safe=""), shlex.quote(plain).strip("'")


def mask(text: str, secrets: Secrets = ()) -> str:
    """The text without the secrets, and without passwords in addresses and headers."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    if ":/" in text:
        text = _ADDRESS.sub(rf"\g<begin>{MASK}", text)
    if "=" in text and ("?" in text or "&" in text or ";" in text):
        text = _QUERY.sub(rf"\g<begin>{MASK}", text)
    if "authorization" in text.lower():
        text = _HEADER.sub(rf"\g<begin>{MASK}", text)
    return text


def mask_tree(value: Any, secrets: Secrets = (), keys: bool = True) -> Any:
    """A tree of plain values with its texts masked; its ``keys`` too, where they are not names of our own, which a secret may be
    part of. Numbers stay what they are."""
    if isinstance(value, str):
        return mask(value, secrets)
    if isinstance(value, Mapping):
        return {
            mask_tree(key, secrets) if keys else key: mask_tree(inner, secrets, keys)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_tree(inner, secrets, keys) for inner in value]
    return value


def mask_error(error: BaseException, secrets: Secrets) -> None:
    """What an error says, and what those say that led to it, masked in place: it keeps its class and its traceback. The
    title of a group of errors cannot be changed."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
        one.args = tuple(_masked_part(part, secrets) for part in one.args)
        for name in (
            *_SHOWN,
            *vars(one),
        ):  # a path that is not there, a command that failed, notes: shown, and no part of the above
            value = getattr(one, name, None)
            clean = _masked_part(value, secrets)
            if clean is not value:
                with suppress(Exception):  # it may be for reading alone
                    setattr(one, name, clean)


_SHOWN = ("filename", "filename2", "strerror", "msg")


def _masked_part(value: Any, secrets: Secrets) -> Any:
    """Like ``masked``, with what is neither text nor a collection of such left alone."""
    if isinstance(value, bytes):
        return mask(value.decode("utf-8", "surrogateescape"), secrets).encode("utf-8", "surrogateescape")
    if isinstance(value, tuple):
        return tuple(_masked_part(inner, secrets) for inner in value) if type(value) is tuple else value
    if isinstance(value, list):
        return [_masked_part(inner, secrets) for inner in value]
    if type(value) is dict:
        return {_masked_part(key, secrets): _masked_part(inner, secrets) for key, inner in value.items()}
    return mask(value, secrets) if isinstance(value, str) else value


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

    @property
    def buffer(self) -> Any:
        return _MaskedBytes(self._stream.buffer, self._secrets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def masked_stream(stream: TextIO, secrets: Secrets) -> TextIO:
    """The stream, masked; one that is already stays as it is."""
    return stream if isinstance(stream, MaskedStream) else cast(TextIO, MaskedStream(stream, secrets))


class _MaskedBytes:
    """The same for what is written beneath it."""

    def __init__(self, stream: Any, secrets: Secrets) -> None:
        self._stream, self._secrets = stream, secrets

    def write(self, data: Any) -> int:
        self._stream.write(_masked_part(bytes(data), self._secrets))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
