"""Tests of the authentication of clusters: tokens of clusters that we start, of clusters that we
join, and warnings."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from orchestrator.errors import ResourceError
from orchestrator.runtime.cluster import auth
from tests.support.canaries import ENVIRONMENT, PATH, assert_none_in, leaky_task
from tests.support.cluster import RayCluster, local_cluster

ROOT = Path(__file__).resolve().parents[3]
SIZES = (
    "--width", "8", "--sequence-length", "8", "--layers", "1", "--experts", "2", "--samples", "64",
    "--batch-size", "8",
)  # fmt: skip
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
            return gcs_service_pb2.CheckAliveReply()  # pyright: ignore[reportAttributeAccessIssue]

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


# --- with Ray


def post(port: int, token: str | None, canary: Path) -> int:
    """Post a job to a dashboard; return the HTTP status."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    body = json.dumps({"entrypoint": f"touch {canary}"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/jobs/", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


JOIN = """
import os, sys
from orchestrator.config.settings import Config
from orchestrator.runtime.cluster.session import session
with session(Config.of(ray_address=sys.argv[1]), print) as joined:
    print("joined" if joined else "started", os.environ.get("RAY_AUTH_MODE"))
print("left", os.environ.get("RAY_AUTH_MODE"))
"""


def join(address: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", JOIN, address]
    return subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )


def without_auth(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH")}


@pytest.fixture(scope="module")
def locked() -> Iterator[RayCluster]:
    """A cluster that requires a token."""
    with local_cluster(cpus=1, dashboard=True) as started:
        yield started


@pytest.mark.ray
def test_a_dashboard_refuses_jobs_without_the_token(locked: RayCluster, tmp_path: Path) -> None:
    """It also listens on this machine only."""
    assert locked.dashboard is not None
    assert mode(Path(locked.environment["RAY_AUTH_TOKEN_PATH"])) == 0o600
    assert post(locked.dashboard, None, tmp_path / "canary") == 401
    assert post(locked.dashboard, "a-guess", tmp_path / "canary") == 403
    assert not (tmp_path / "canary").exists()
    addresses = set(listening_addresses(locked.dashboard))
    assert addresses, "the dashboard listens nowhere"
    assert addresses <= {"127.0.0.1", "::1"}


def listening_addresses(port: int) -> list[str]:
    import psutil

    connections: list[Any] = psutil.net_connections("tcp")
    local = [connection.laddr for connection in connections if connection.status == "LISTEN"]
    return [address.ip for address in local if address and address.port == port]


@pytest.mark.ray
def test_a_cluster_that_requires_a_token_is_joined_with_it(locked: RayCluster) -> None:
    """Ray itself would present none for an address that is given. Afterwards the mode is as before."""
    environment = {name: value for name, value in locked.environment.items() if name != "RAY_AUTH_MODE"}
    result = join(locked.address, environment)
    assert result.stdout.split("\n")[:2] == ["joined token", "left None"], result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_wrong_token_and_a_missing_one_are_reported(locked: RayCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("f" * 64)
    environment = without_auth(locked.environment) | {"HOME": str(tmp_path)}
    refused = join(locked.address, environment | {"RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert "could not be joined" in refused.stderr
    assert "it refuses the token here" in refused.stderr
    missing = join(locked.address, environment)
    assert "requires a token, and there is none here" in missing.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_an_open_cluster_is_joined_with_a_warning() -> None:
    class OpenCluster(RayCluster):
        def _start(self, *arguments: str, private: Sequence[Path] = ()) -> None:
            self.environment = self.environment | {"RAY_AUTH_MODE": "disabled"}
            super()._start(*arguments, private=private)

    open_cluster = OpenCluster(1)
    try:
        result = join(open_cluster.address, without_auth(open_cluster.environment))
    finally:
        open_cluster.close()
    assert result.stdout.count("requires no token") == 1, result.stdout + result.stderr
    assert "joined None" in result.stdout


PORT_SCAN = """
import http.client, json, os, sys, urllib.error, urllib.request
import psutil
from orchestrator.config.settings import Config
from orchestrator.runtime.cluster.session import session

PATHS = ("/api/jobs/", "/api/job_agent/jobs/")

def post(ip, port, path, token):
    host = "127.0.0.1" if ip in ("0.0.0.0", "::") else ip
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    body = json.dumps({"entrypoint": f"touch {sys.argv[1]}"}).encode()
    request = urllib.request.Request(f"http://{host}:{port}{path}", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException) as error:  # other protocols
        return type(error).__name__

def listening():
    driver = psutil.Process()
    for process in [driver, *driver.children(recursive=True)]:
        for connection in process.net_connections("tcp"):
            if connection.status == "LISTEN":
                yield connection.laddr.ip, connection.laddr.port

with session(Config.of(ray_address="local"), print):
    ports = sorted(set(listening()))
    own_token = open(os.path.expanduser("~/.ray/auth_token")).read().strip()
    strangers = [(ip, port, path, token, post(ip, port, path, token))
                 for ip, port in ports for path in PATHS for token in (None, "f" * 64)]
    owner = [post(ip, port, PATHS[1], own_token) for ip, port in ports]
print("SCAN", json.dumps([ports, strangers, owner]))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_cluster_of_ours_refuses_strangers_at_every_port(tmp_path: Path) -> None:
    """A user without a token gets a private one, and there is no dashboard.

    No port takes a job, not even from the owner of the token. Ports that refuse strangers do not
    refuse the owner, so that the refusals mean something.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PORT_SCAN, str(tmp_path / "canary")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert mode(tmp_path / ".ray" / "auth_token") == 0o600
    scan = json.loads(result.stdout.partition("SCAN")[2] or "null")
    ports, strangers, owner = scan or pytest.fail(result.stdout + result.stderr)
    assert len(ports) > 3
    refused = {401, 403}
    harmless = refused | {404, 405, 415}  # or the port serves no jobs
    assert {status for *_, status in strangers} & refused
    assert not [entry for entry in strangers if isinstance(entry[-1], int) and entry[-1] not in harmless]
    assert not set(owner) & refused, owner
    assert not [status for status in owner if isinstance(status, int) and status not in harmless], owner
    assert not (tmp_path / "canary").exists()


CLUSTER_STATE = """
import json, sys
import ray
from ray.util.state import list_actors, list_jobs, list_tasks
ray.init(address=sys.argv[1], log_to_driver=False)
options = dict(address=sys.argv[2], detail=True, limit=1000, raise_on_missing_output=False)
state = [[str(entry) for entry in query(**options)] for query in (list_jobs, list_actors, list_tasks)]
print("STATE", json.dumps(state))
"""

TRAIN = ("train", "--max-steps", "30", "--workers", "2", "--parallel-strategy")
VERBS = {
    "data_parallel": (*TRAIN, "data_parallel"),
    "expert_parallel": (*TRAIN, "expert_parallel"),
    "sweep": ("sweep", "--sweep", "learning-rate=1e-3,1e-2", "--trial-seconds", "1", "--workers", "1"),
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("known", [True, False], ids=["known to the nodes", "known to the driver"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_run_on_a_cluster_reveals_no_secret(
    tmp_path: Path, verb: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task prints all secrets that it can find, lets a program print some, and fails with them.

    None of them, nor the token of the cluster, is in the run folder, in the driver's output, in
    the state of the cluster, or in Ray's logs. Nodes whose environment has no secrets find them
    in the settings.
    """
    for name, value in ENVIRONMENT.items() if known else ():
        monkeypatch.setenv(name, value)
    leaky_task(tmp_path, raises=True, with_subprocess=True)
    run_dir = tmp_path / "run"
    task = ("--task", "leaky:Leaky", "--run-dir", str(run_dir), "--data-dir", PATH)
    with local_cluster(cpus=2, dashboard=True) as started:
        environment: dict[str, Any] = started.environment | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-m", "orchestrator", *VERBS[verb], *task, *SIZES]
        result = subprocess.run(
            [*program, "--ray-address", started.address],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        dashboard = f"http://127.0.0.1:{started.dashboard}"
        query = [sys.executable, "-c", CLUSTER_STATE, started.address, dashboard]
        state = subprocess.run(query, env=environment, capture_output=True, text=True, timeout=120)
        shutil.copytree(started.folder / "session_latest" / "logs", tmp_path / "ray")
        token = Path(started.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    files = [path for folder in ("run", "ray") for path in (tmp_path / folder).rglob("*.*")]
    texts = {path.name: path.read_text(errors="replace") for path in files}
    assert result.returncode == (4 if verb == "sweep" else 2), result.stdout + result.stderr
    assert "cannot log in" in (texts["sweep.jsonl"] if verb == "sweep" else result.stderr)
    # Before there is a run folder, workers write to Ray's logs.
    printed = "".join(text for name, text in texts.items() if name.startswith("worker"))
    assert ("printed ***" if known else "printed /data/***") in printed
    assert not known or verb == "sweep" or "subprocess ***" in printed
    assert "orchestrator" in state.stdout, state.stderr
    assert_none_in(run_dir)
    assert_none_in(result.stdout + result.stderr)
    assert_none_in(state.stdout.partition("STATE")[2])
    assert_none_in(tmp_path / "ray")
    written = [path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()]
    assert not [text for text in (result.stdout, result.stderr, state.stdout, *written) if token in text]
