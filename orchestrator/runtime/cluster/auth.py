"""Authentication of Ray clusters.

A cluster that we start requires a token, which only its owner can read from the moment it
exists. A cluster that requires none is joined with a warning.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import grpc

from orchestrator.errors import ResourceError
from orchestrator.runtime.cluster.environment import set_variables, variable
from orchestrator.runtime.ray_internals import (
    check_head_alive,
    forget_auth_token,
    has_auth_token,
    load_tls_certificates,
    reload_auth_mode,
)

AUTH_MODE = "RAY_AUTH_MODE"
_REQUEST_TIMEOUT_S = 3.0
_WARNED: set[str] = set()
"""Open clusters that the user was warned about: a command may join one several times."""


def prepare_token() -> None:
    """Turn authentication on before a cluster starts, with a token that only the user can read.

    Ray would make a token that every user of the machine can read.
    """
    if variable(AUTH_MODE).lower() == "disabled":
        return  # requested by the user; ``warn_if_open`` reports it once the cluster runs
    named_path = variable("RAY_AUTH_TOKEN_PATH")
    path = Path(named_path or Path.home() / ".ray" / "auth_token")
    if not variable("RAY_AUTH_TOKEN") and not named_path:
        _create_token(path)
    _make_private(path)
    _turn_on()
    if named_path and not has_auth_token():
        raise ResourceError(
            f"RAY_AUTH_TOKEN_PATH is {named_path}, which holds no token; "
            "unset it, and one is made in ~/.ray/auth_token"
        )


def _create_token(path: Path) -> None:
    """Create a token unless there is one.

    The file appears complete and private in one step, because another command may start a
    cluster meanwhile.
    """
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A temporary file is readable by its owner only.
    with NamedTemporaryFile("w", dir=path.parent, prefix=".auth_token-") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(file.name, path)


def _make_private(path: Path) -> None:
    """Remove the permissions of other users from a token that Ray made earlier."""
    with suppress(OSError):
        status = path.stat()
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o600)


def _turn_on() -> None:
    set_variables({AUTH_MODE: "token"})
    reload_auth_mode()
    forget_auth_token()


def present_token(address: str) -> None:
    """Turn authentication on before joining a cluster that requires a token, and only then.

    Ray does not do so for an address that is given. Raises ResourceError if there is no token.
    """
    if variable(AUTH_MODE) or not requires_token(address):
        return
    if not has_auth_token():
        raise ResourceError(
            f"the Ray cluster at {address} requires a token, and there is none here; put that of its head "
            "(there: 'ray get-auth-token') into ~/.ray/auth_token, readable by you alone, "
            "or name a file by RAY_AUTH_TOKEN_PATH"
        )
    _turn_on()


def warn_if_open(address: str, note: Callable[[str], None]) -> None:
    """Warn once about a cluster that requires no token."""
    if address in _WARNED or requires_token(address) is not False:
        return
    _WARNED.add(address)
    note(
        f"warning: the Ray cluster at {address} requires no token: everyone who reaches its ports can "
        "run code there "
        "and read your data. Give it one: 'ray get-auth-token --generate' on its head, "
        "the same ~/.ray/auth_token "
        "on every node, then start it again with RAY_AUTH_MODE=token"
    )


def requires_token(address: str) -> bool | None:
    """Return whether the head at HOST:PORT refuses a request without a token; None if the answer
    says neither."""
    # With wrong certificates the question stays open: Ray reports what is wrong with them when it
    # joins.
    with suppress(OSError, RuntimeError), _open_channel(address) as channel:
        try:
            check_head_alive(channel, _REQUEST_TIMEOUT_S)
        except grpc.RpcError as error:
            code = error.code()
            return True if code == grpc.StatusCode.UNAUTHENTICATED else None
        return False
    return None


def _open_channel(address: str) -> grpc.Channel:
    """Open a channel to a head that sends no token; Ray's own channels send it."""
    options = [("grpc.enable_http_proxy", 0)]
    if variable("RAY_USE_TLS").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options=options)
    chain, key, root = load_tls_certificates()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, chain), options=options)
