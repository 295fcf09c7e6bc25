"""Masking of secrets in everything that is written and shown.

Secrets are values of environment variables with a telling name, and texts that are secrets by their
form (passwords in addresses, private keys) or by the name before them. The functions are pure: the
caller reads the environment and passes the values.
"""

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
"""Texts to mask, the longest first: one secret may contain another."""

MASK = "***"
_MIN_CHARS = 6  # shorter values are words of ordinary text
_MIN_TOKEN_CHARS = 20  # of a token that is known by its form alone
_MIN_LINE_CHARS = 16  # of a secret of several lines, such as a private key
_STRONG_NAMES = re.compile(
    r".*(PASSWORDS?|PASSWD|PASSPHRASE|PASSCODE|SECRETS?|TOKEN|CREDENTIALS?|(?<![A-Z])CREDS?|CONNECTION_?STRING"
    r"|(API|ACCESS|ACCOUNT|PRIVATE|SIGNING|ENCRYPTION|MASTER|SHARED)_?KEY)(\d+|_\w*)?",
    re.IGNORECASE,
)
"""Names that tell of a secret, whatever follows: NPM_TOKEN_RO. TOKENIZER and MAX_TOKENS do not."""
_DESCRIPTIONS = re.compile(
    r".*_(PATH|FILE|FILENAME|DIR|FOLDER|NAME|TYPE|COUNT|LENGTH|LEN|SIZE|LIMIT|BUDGET|TTL|EXPIRY|EXPIRES|EXPIRATION"
    r"|TIMEOUT|INTERVAL|SECONDS|MODE|METHOD|PROVIDER|BACKEND|HEADER|URL|URI|ENDPOINT|HOST|PORT|ENABLED|VERSION)",
    re.IGNORECASE,
)
"""Names of what is known about a secret: TOKEN_PATH."""
_WEAK_NAMES = re.compile(
    r"(.*_)?(KEY|KEY_ID|PWD|PAT|PASS|O?AUTH|JWT|BEARER|DSN|COOKIE|(SAS|WEBHOOK)(_UR[LI])?)"
    r"(_?\d+|_(PROD|PRODUCTION|STAGING|DEV|TEST|LIVE|MAIN|OLD|NEW|RO|RW|READ|WRITE))?",
    re.IGNORECASE,
)
"""Words that tell of a secret at the end of a name."""
# scheme://user:password@host, also with one slash, as a path is written. A password may hold any
# character except those that end this part of an address. That includes @, so the last @ ends the
# password.
_ADDRESS = re.compile(
    r"(?P<begin>[A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2}[^\s/:@'\"<>]*:)(?P<password>[^\s/'\"<>]+)(?=@)"
)
# ?token=…&x-amz-signature=… in an address, and ;AccountKey=… in a connection string of a database
# or store.
_QUERY = re.compile(
    r"(?P<begin>[?&;](?:[A-Za-z0-9_.-]*"
    r"(?:password|passwd|secret|token|(?:api|access|account)_?key|signature|credential)|key|sig|pwd)=)"
    r"(?P<value>[^\s&;#'\"<>]+)",
    re.IGNORECASE,
)
# https://TOKEN@host: a user without a password who is no person.
_ADDRESS_TOKEN = re.compile(
    r"(?P<begin>https?:/{1,2})(?P<password>(?=[^\s/:@'\"<>]*\d)[^\s/:@'\"<>]{16,}|[^\s/:@'\"<>]{24,})(?=@)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(?P<begin>authorization['\"]?\s*[:=]\s*b?['\"]?(?:bearer|basic|token)\s+)(?P<value>[^\s,;'\"<>]+)",
    re.IGNORECASE,
)
_COOKIE = re.compile(
    r"(?P<begin>\b(?:set-)?cookie['\"]?\s{0,8}:\s{0,8}['\"]?)[^\s=;'\"]{1,64}=[^\r\n'\"]*", re.IGNORECASE
)
# PGPASSWORD=…, "api_key": "…", X-Api-Key: …, --hf-token …: names that nothing but a secret has. A bare
# "token" is none of them, because it is a word of language models. $(…) and ${…} are read by a shell.
_SECRET_NAME = (
    r"(?:pass(?:word|wd|phrase|code)|client[_-]?secret|shared_?access_?signature"
    r"|(?:secret|api|access|account|private)[_-]?key|(?:signing|encryption|subscription)[_-]key"
    r"|(?:access|auth|refresh|session|security|bearer|api|private|hf|github|gitlab|npm)[_-]token)"
)
_ASSIGNED = re.compile(
    rf"(?P<begin>(?:{_SECRET_NAME}['\"\\]{{0,2}}\s{{0,8}}[:=]|--[a-z-]{{0,30}}{_SECRET_NAME}['\"]?[,\s])"
    r"\s{0,8}b?['\"\\]{0,2})(?!\*\*\*|\$[({]|(?:none|null|true|false)\b)[^\s,;'\"<>\\]+",
    re.IGNORECASE,
)
_KNOWN_TOKEN = re.compile(
    r"(?P<begin>(?<![A-Za-z0-9_-]))(?:eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+|gh[opsru]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|glpat-[\w-]{20,}|(?:hf|npm)_[A-Za-z0-9]{30,}|xox[a-z]-[\w-]{10,}|sk-[\w-]{32,}|AIza[\w-]{35}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Z]))",
    re.ASCII,
)
_PRIVATE_KEY = re.compile(
    r"(?P<begin>)-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}-----|\Z)", re.DOTALL
)
_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (("private key-----",), _PRIVATE_KEY),
    ((":/",), _ADDRESS),
    ((":/",), _ADDRESS_TOKEN),
    (("?", "&", ";"), _QUERY),
    (("authorization",), _HEADER),
    (("cookie",), _COOKIE),
    (
        ("passw", "passphrase", "passcode", "_key", "-key", "_token", "-token", "secret", "signature"),
        _ASSIGNED,
    ),
    (("apikey", "secretkey", "accesskey", "accountkey", "privatekey"), _ASSIGNED),
    (("eyj", "gh", "glpat-", "hf_", "npm_", "xox", "sk-", "aiza", "akia", "asia"), _KNOWN_TOKEN),
)
"""Expressions of secrets, each with texts in small letters of which one is in every match: to search for a
substring costs far less than a regular expression, and most texts match none."""
_SHOWN_ATTRIBUTES = ("filename", "filename2", "strerror", "msg")
"""Attributes of exceptions that are shown, but are neither in ``args`` nor in ``vars``."""


def secrets_of(environment: Mapping[str, str]) -> Secrets:
    """Return the secrets of an environment, in all forms in which they may be written."""
    values: set[str] = set()
    for name, value in environment.items():
        if _is_secret_name(name):
            values |= {value, value.strip()}
        for address in (_ADDRESS, _ADDRESS_TOKEN):
            values |= {unquote(match["password"]) for match in address.finditer(value)}
    return longest_first(form for value in values for form in _forms(value))


def _is_secret_name(name: str) -> bool:
    """Whether the name of a variable tells that its value is a secret."""
    if _STRONG_NAMES.fullmatch(name) and not _DESCRIPTIONS.fullmatch(name):
        return True
    return _WEAK_NAMES.fullmatch(name) is not None and name != "PWD"


def longest_first(*several: Iterable[str]) -> Secrets:
    """Return the union of several collections of secrets, without those too short to mask."""
    union = {form for forms in several for form in forms if len(form) >= _MIN_CHARS}
    return tuple(sorted(union, key=lambda form: (-len(form), form)))


def secrets_in(tree: Any, secrets: Secrets) -> Secrets:
    """Return the secrets that the texts of a tree contain, in all their forms.

    A receiver of the tree knows them already, so it may know all their forms.
    """
    text = "\n".join(_texts(tree))
    return longest_first(form for secret in secrets if secret in text for form in _forms(secret))


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        children = (*tree, *tree.values()) if isinstance(tree, Mapping) else tree
        for child in children:
            yield from _texts(child)


def _forms(value: str) -> set[str]:
    """Return a secret as it is, and as JSON, Python, HTML, an address and a shell would write it.

    Of a secret of several lines each long line counts as well: logs split it.
    """
    is_multiline = "\n" in value.strip()
    lines = [line for line in value.splitlines() if len(line) >= _MIN_LINE_CHARS] if is_multiline else []
    return {form for text in (value, *lines) for form in _encodings(text)}


def _encodings(text: str) -> tuple[str, ...]:
    return (
        text,
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        repr(text)[1:-1],
        escape(text),
        quote(text),
        quote(text, safe=""),
        shlex.quote(text).strip("'"),
    )


def mask(text: str, secrets: Secrets = ()) -> str:
    """Return the text without the secrets, and without what is a secret by its form or its name."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    # Most texts of events are names.
    if len(text) < _MIN_TOKEN_CHARS and text.isidentifier():
        return text
    lowered = text.lower()
    for hints, pattern in _RULES:
        for hint in hints:
            if hint in lowered:
                text = pattern.sub(rf"\g<begin>{MASK}", text)
                break
    return text


def mask_tree(value: Any, secrets: Secrets = (), keys: bool = True) -> Any:
    """Return a tree of plain values with masked texts; numbers stay.

    ``keys=False`` keeps the keys: they are names of our own, which a secret may happen to be part
    of.
    """
    if isinstance(value, str):
        return mask(value, secrets)
    if isinstance(value, Mapping):
        return {
            mask_tree(key, secrets) if keys else key: mask_tree(child, secrets, keys)
            for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_tree(child, secrets, keys) for child in value]
    return value


def mask_error(error: BaseException, secrets: Secrets) -> None:
    """Mask the texts of an error and of its causes in place; class and traceback stay.

    The title of an exception group cannot be changed.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
        current.args = tuple(_mask_part(part, secrets) for part in current.args)
        # A missing path, a failed command, notes: they are shown, and are no part of ``args``.
        for name in (*_SHOWN_ATTRIBUTES, *vars(current)):
            value = getattr(current, name, None)
            clean = _mask_part(value, secrets)
            if clean is not value:
                with suppress(Exception):  # the attribute may be read-only
                    setattr(current, name, clean)


def _mask_part(value: Any, secrets: Secrets) -> Any:
    """Mask like ``mask_tree``, but keep the types of collections and mask bytes too."""
    if isinstance(value, bytes):
        return mask(value.decode("utf-8", "surrogateescape"), secrets).encode("utf-8", "surrogateescape")
    if isinstance(value, tuple):
        # A named tuple has a constructor of its own and stays.
        return tuple(_mask_part(child, secrets) for child in value) if type(value) is tuple else value
    if isinstance(value, list):
        return [_mask_part(child, secrets) for child in value]
    if type(value) is dict:
        return {_mask_part(key, secrets): _mask_part(child, secrets) for key, child in value.items()}
    return mask(value, secrets) if isinstance(value, str) else value


class MaskedStream:
    """A text stream that masks everything written to it; all other attributes are those of the stream."""

    def __init__(self, stream: TextIO, secrets: Secrets) -> None:
        self._stream = stream
        self._secrets = secrets

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
    """Return the stream, masked; a masked one is returned as it is."""
    return stream if isinstance(stream, MaskedStream) else cast(TextIO, MaskedStream(stream, secrets))


class _MaskedBytes:
    """The binary stream below a ``MaskedStream``."""

    def __init__(self, stream: Any, secrets: Secrets) -> None:
        self._stream = stream
        self._secrets = secrets

    def write(self, data: Any) -> int:
        self._stream.write(_mask_part(bytes(data), self._secrets))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
