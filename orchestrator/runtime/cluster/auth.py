"""Who may enter a Ray cluster. Those that we start ask for a token, which its owner alone can read from the moment it exists; one
that asks for none is joined with a warning."""

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

MODE = "RAY_AUTH_MODE"
_ASK_SECONDS = 3.0
_TOLD: set[str] = set()
"""Clusters without a token that the user has been warned of: a command may join one several times."""


def lock_token() -> None:
    """Before a cluster is started: turn authentication on, and see to it that there is a token which the user alone can read. Ray
    would make one that everybody can."""
    if variable(MODE).lower() == "disabled":
        return  # the user's wish; told once the cluster is there
    path, named = _token_path(), variable("RAY_AUTH_TOKEN_PATH")
    if not variable("RAY_AUTH_TOKEN") and not named:
        _make(path)
    _keep_private(path)
    _turn_on()
    if named and not has_auth_token():
        raise ResourceError(
            f"RAY_AUTH_TOKEN_PATH is {named}, which holds no token; unset it, and one is made in ~/.ray/auth_token"
        )


def _token_path() -> Path:
    return Path(variable("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _make(path: Path) -> None:
    """A token where there is none. It appears whole and private, in one step: another start may be looking for it."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(
        "w", dir=path.parent, prefix=".auth_token-"
    ) as beside:  # readable by its owner alone
        beside.write(secrets.token_hex(32))
        beside.flush()
        os.fsync(beside.fileno())
        with suppress(FileExistsError):
            os.link(beside.name, path)


def _keep_private(path: Path) -> None:
    """One that Ray made earlier may be open to all."""
    with suppress(OSError):
        found = path.stat()
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o600)


def _turn_on() -> None:
    set_variables({MODE: "token"})
    reload_auth_mode()
    forget_auth_token()


def show_token(address: str) -> None:
    """Before a cluster is joined: have the token ready where it asks for one, and only there. Ray itself would not for an address
    that is named. ResourceError where there is none to show."""
    if variable(MODE) or not asks_for_token(address):
        return
    if not has_auth_token():
        raise ResourceError(
            f"the Ray cluster at {address} asks for a token, and there is none here; put that of its head (there: 'ray get-auth-token') "
            "into ~/.ray/auth_token, readable by you alone, or name a file by RAY_AUTH_TOKEN_PATH"
        )
    _turn_on()


def warn_if_open(address: str, note: Callable[[str], None]) -> None:
    """Tell once of a cluster that lets everybody in."""
    if address in _TOLD or asks_for_token(address) is not False:
        return
    _TOLD.add(address)
    note(
        f"warning: the Ray cluster at {address} asks for no token: whoever reaches its ports can run code there, and read what you "
        "train. Give it one: 'ray get-auth-token --generate' on its head, the same ~/.ray/auth_token on every node, then start it anew "
        "with RAY_AUTH_MODE=token"
    )


def asks_for_token(address: str) -> bool | None:
    """Whether the head at HOST:PORT turns away who shows no token; None where it says neither."""
    with (
        suppress(OSError, RuntimeError),
        _channel(address) as channel,
    ):  # without its certificates Ray says what is wrong with them
        try:
            check_head_alive(channel, _ASK_SECONDS)
        except grpc.RpcError as error:
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            return True if code == grpc.StatusCode.UNAUTHENTICATED else None
        return False
    return None


def _channel(address: str) -> grpc.Channel:
    """To a head, without a token: Ray's own would show it."""
    options = [("grpc.enable_http_proxy", 0)]
    if variable("RAY_USE_TLS").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, options=options)
    chain, key, root = load_tls_certificates()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, chain), options=options)
