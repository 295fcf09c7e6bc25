"""Tests of the tokens of clusters, without Ray's processes: made and found here, required by a head, and
warnings."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray._raylet import AuthenticationTokenLoader  # pyrefly: ignore[missing-module-attribute]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from orchestrator.errors import ResourceError
from orchestrator.runtime.cluster import auth

ADDRESS = "192.0.2.1:6379"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's home without a token. Ray's own mode stays as it is."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(auth, "reload_auth_mode", lambda: None)
    AuthenticationTokenLoader.instance().reset_cache()  # Ray keeps the token that it has read
    umask = os.umask(0)  # the worst case: files created without a mode are open to all
    yield tmp_path
    os.umask(umask)
    AuthenticationTokenLoader.instance().reset_cache()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_token_is_private_from_the_moment_it_exists(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    link = os.link
    monkeypatch.setattr(
        os, "link", lambda source, path: (modes.append(mode(Path(source))), link(source, path))
    )
    auth.prepare_token()
    token = home / ".ray" / "auth_token"
    assert modes == [0o600]
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_an_existing_token_is_kept_and_made_private(home: Path) -> None:
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("of-before")
    token.chmod(0o644)
    auth.prepare_token()
    assert (token.read_text(), mode(token)) == ("of-before", 0o600)


def test_a_token_at_a_named_path_is_made_private_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = home / "my_token"
    token.write_text("of-before")
    token.chmod(0o664)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    auth.prepare_token()
    assert mode(token) == 0o600
    assert not (home / ".ray").exists()


def test_without_authentication_no_token_is_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    auth.prepare_token()
    assert not (home / ".ray").exists()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_an_open_cluster_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "requires_token", lambda _: False)
    monkeypatch.setattr(auth, "_WARNED", set())
    notes: list[str] = []
    for _ in range(3):
        auth.warn_if_open(ADDRESS, notes.append)
    (warning,) = notes
    assert ADDRESS in warning
    assert "requires no token" in warning
    assert "ray get-auth-token --generate" in warning


@pytest.mark.parametrize("answer", [True, None])
def test_other_clusters_are_not_warned_about(monkeypatch: pytest.MonkeyPatch, answer: bool | None) -> None:
    monkeypatch.setattr(auth, "requires_token", lambda _: answer)
    auth.warn_if_open("192.0.2.2:6379", pytest.fail)


def test_a_missing_token_is_an_error_before_the_cluster_is_joined(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "requires_token", lambda _: True)
    with pytest.raises(ResourceError, match="requires a token, and there is none here"):
        auth.present_token(ADDRESS)


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_named_file_without_a_token_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = home / "my_token"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.setattr(auth, "requires_token", lambda _: True)
    with pytest.raises(ResourceError, match=r"RAY_AUTH_TOKEN_PATH is .*my_token, which holds no token"):
        auth.prepare_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    with pytest.raises(ResourceError, match="there is none here"):
        auth.present_token(ADDRESS)


def test_a_token_is_presented_only_where_it_is_required(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "requires_token", lambda _: False)
    auth.present_token(ADDRESS)
    assert os.environ["RAY_AUTH_MODE"] == ""


def test_a_missing_head_leaves_the_question_open() -> None:
    assert auth.requires_token("127.0.0.1:1") is None


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("cryptography")
    from ray._common.tls_utils import generate_self_signed_tls_certs

    folder = tmp_path_factory.mktemp("tls")
    for name, text in zip(("cert", "key"), generate_self_signed_tls_certs(), strict=True):
        (folder / name).write_text(text)
    named = {"RAY_TLS_SERVER_CERT": "cert", "RAY_TLS_SERVER_KEY": "key", "RAY_TLS_CA_CERT": "cert"}
    return {"RAY_USE_TLS": "1"} | {name: str(folder / file) for name, file in named.items()}


@contextmanager
def fake_head(requires: bool) -> Iterator[str]:
    """A server that answers like the head of a cluster, over TLS if the environment says so."""
    from ray._common.tls_utils import add_port_to_grpc_server

    class Nodes(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
        def CheckAlive(self, request: Any, context: Any) -> Any:
            keys = [key for key, _ in context.invocation_metadata()]
            assert "authorization" not in keys, "the request has a token"
            if requires:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            return gcs_service_pb2.CheckAliveReply()

    server = grpc.server(ThreadPoolExecutor(1))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(Nodes(), server)
    port = add_port_to_grpc_server(server, "localhost:0")
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(None)


@pytest.mark.parametrize("requires", [True, False])
@pytest.mark.parametrize("tls", [True, False])
def test_a_head_says_whether_it_requires_a_token_with_and_without_tls(
    certificates: dict[str, str], tls: bool, requires: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in certificates.items() if tls else ():
        monkeypatch.setenv(name, value)
    with fake_head(requires) as address:
        assert auth.requires_token(address) is requires
        monkeypatch.setenv("RAY_USE_TLS", "0" if tls else "1")
        monkeypatch.delenv("RAY_TLS_CA_CERT", raising=False)
        assert auth.requires_token(address) is None, "over the wrong transport there is no answer"
