"""The door of a cluster: locked where we made it, knocked at rightly where others did, and told of where there is none."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from orchestrator.errors import ResourceError
from orchestrator.runtime.cluster import auth as authentication
from tests.support.canaries import ENVIRONMENT, PATH, URL, assert_none_in, leaky_task
from tests.support.cluster import Cluster, cluster

ROOT = Path(__file__).resolve().parents[3]
SIZES = (
    "--width",
    "8",
    "--context-length",
    "8",
    "--layers",
    "1",
    "--experts",
    "2",
    "--samples",
    "64",
    "--batch-size",
    "8",
)
ADDRESS = "192.0.2.1:6379"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user without a token, and nothing of Ray's touched."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(authentication, "reload_auth_mode", lambda: None)
    AuthenticationTokenLoader.instance().reset_cache()  # Ray remembers the token that it has read
    old = os.umask(0)  # the worst case: whatever is made without a mode is open to all
    yield tmp_path
    os.umask(old)
    AuthenticationTokenLoader.instance().reset_cache()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_token_is_its_owners_alone_from_the_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    link = os.link
    monkeypatch.setattr(os, "link", lambda made, path: (modes.append(mode(Path(made))), link(made, path)))
    authentication.lock_token()
    token = home / ".ray" / "auth_token"
    assert modes == [0o600]
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_an_older_token_is_kept_and_closed(home: Path) -> None:
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("of-before")
    token.chmod(0o644)
    authentication.lock_token()
    assert (token.read_text(), mode(token)) == ("of-before", 0o600)


def test_a_token_elsewhere_is_closed_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = home / "mine"
    token.write_text("of-before")
    token.chmod(0o664)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    authentication.lock_token()
    assert mode(token) == 0o600
    assert not (home / ".ray").exists()


def test_who_wants_no_token_gets_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    authentication.lock_token()
    assert not (home / ".ray").exists()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_an_open_cluster_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "asks_for_token", lambda _: False)
    monkeypatch.setattr(authentication, "_TOLD", set())
    notes: list[str] = []
    for _ in range(3):
        authentication.warn_if_open(ADDRESS, notes.append)
    (told,) = notes
    assert ADDRESS in told
    assert "asks for no token" in told
    assert "ray get-auth-token --generate" in told


@pytest.mark.parametrize("answer", [True, None])
def test_others_are_not(monkeypatch: pytest.MonkeyPatch, answer: bool | None) -> None:
    monkeypatch.setattr(authentication, "asks_for_token", lambda _: answer)
    authentication.warn_if_open("192.0.2.2:6379", pytest.fail)


def test_no_token_for_a_cluster_that_asks_for_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "asks_for_token", lambda _: True)
    with pytest.raises(ResourceError, match="asks for a token, and there is none here"):
        authentication.show_token(ADDRESS)


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_file_that_is_named_and_holds_no_token_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = home / "mine"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.setattr(authentication, "asks_for_token", lambda _: True)
    with pytest.raises(ResourceError, match=r"RAY_AUTH_TOKEN_PATH is .*mine, which holds no token"):
        authentication.lock_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    with pytest.raises(ResourceError, match="there is none here"):
        authentication.show_token(ADDRESS)


def test_a_token_is_shown_only_to_who_asks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "asks_for_token", lambda _: False)
    authentication.show_token(ADDRESS)
    assert os.environ["RAY_AUTH_MODE"] == ""


def test_a_head_that_is_not_there_says_nothing() -> None:
    assert authentication.asks_for_token("127.0.0.1:1") is None


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
def head(asks: bool) -> Iterator[str]:
    """Something that answers as a head of a cluster does, over TLS where the environment says so."""
    from ray._common.tls_utils import add_port_to_grpc_server

    class Nodes(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
        def CheckAlive(self, request: Any, context: Any) -> Any:
            assert not [key for key, _ in context.invocation_metadata() if key == "authorization"], (
                "a token was shown"
            )
            if asks:
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


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("tls", [True, False])
def test_a_head_is_asked_in_its_own_way(
    certificates: dict[str, str], tls: bool, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in certificates.items() if tls else ():
        monkeypatch.setenv(name, value)
    with head(asks) as address:
        assert authentication.asks_for_token(address) is asks
        monkeypatch.setenv("RAY_USE_TLS", "0" if tls else "1")
        monkeypatch.delenv("RAY_TLS_CA_CERT", raising=False)
        assert authentication.asks_for_token(address) is None, "in the other way it says nothing"


# --- with Ray


def post(port: int, token: str | None, canary: Path) -> int:
    """Ask a dashboard to run a command. Returns the status of its answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    body = json.dumps({"entrypoint": f"touch {canary}"}).encode()
    try:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/api/jobs/", data=body, headers=headers)
        with urllib.request.urlopen(asked, timeout=20) as answer:
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


@pytest.fixture(scope="module")
def locked() -> Iterator[Cluster]:
    with cluster(cpus=1, dashboard=True) as made:
        yield made


@pytest.mark.ray
def test_no_job_without_the_token(locked: Cluster, tmp_path: Path) -> None:
    """What a stranger posts to the dashboard is refused; the dashboard listens to this machine alone."""
    assert locked.dashboard is not None
    assert mode(Path(locked.environment["RAY_AUTH_TOKEN_PATH"])) == 0o600
    assert post(locked.dashboard, None, tmp_path / "canary") == 401
    assert post(locked.dashboard, "a-guess", tmp_path / "canary") == 403
    assert not (tmp_path / "canary").exists()
    heard = set(_listeners(locked.dashboard))
    assert heard, "the dashboard listens nowhere"
    assert heard <= {"127.0.0.1", "::1"}


def _listeners(port: int) -> list[str]:
    import psutil

    heard: list[Any] = [c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr]
    return [address.ip for address in heard if address.port == port]


@pytest.mark.ray
def test_a_locked_cluster_is_joined_with_the_token_at_hand(locked: Cluster) -> None:
    """Though Ray itself would show none for an address that is named, and the mode is left as it was."""
    environment = {name: value for name, value in locked.environment.items() if name != "RAY_AUTH_MODE"}
    done = join(locked.address, environment)
    assert done.stdout.split("\n")[:2] == ["joined token", "left None"], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_a_wrong_token_and_none_are_told(locked: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("f" * 64)
    plain = {name: value for name, value in locked.environment.items() if not name.startswith("RAY_AUTH")} | {
        "HOME": str(tmp_path)
    }
    refused = join(locked.address, plain | {"RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert "could not be joined" in refused.stderr
    assert "it refuses the token here" in refused.stderr
    nothing = join(locked.address, plain)
    assert "asks for a token, and there is none here" in nothing.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_an_open_cluster_is_joined_with_a_warning(tmp_path: Path) -> None:
    class Open(Cluster):
        def _start(self, *arguments: str) -> None:
            self.environment = self.environment | {"RAY_AUTH_MODE": "disabled"}
            super()._start(*arguments)

    here = Open(1)
    try:
        environment = {
            name: value for name, value in here.environment.items() if not name.startswith("RAY_AUTH")
        }
        done = join(here.address, environment)
    finally:
        here.close()
    assert done.stdout.count("asks for no token") == 1, done.stdout + done.stderr
    assert "joined None" in done.stdout


KNOCK = """
import http.client, json, os, sys, urllib.error, urllib.request
import psutil
from orchestrator.config.settings import Config
from orchestrator.runtime.cluster.session import session

def post(host, port, path, headers):
    body = json.dumps({"entrypoint": f"touch {sys.argv[1]}"}).encode()
    asked = urllib.request.Request(f"http://{host}:{port}{path}", data=body, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(asked, timeout=3) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException) as error:  # other protocols
        return type(error).__name__

def all_doors():
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        for connection in process.net_connections("tcp"):
            if connection.status == "LISTEN":
                yield connection.laddr.ip, connection.laddr.port

with session(Config.of(ray_address="local"), print):
    doors = sorted(set(all_doors()))
    token = open(os.path.expanduser("~/.ray/auth_token")).read().strip()
    paths = ("/api/jobs/", "/api/job_agent/jobs/")
    said = [(ip, port, path, guess, post("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port, path, headers))
            for ip, port in doors for path in paths
            for guess, headers in ((None, {}), ("wrong", {"Authorization": "Bearer " + "f" * 64}))]
    mine = {"Authorization": f"Bearer {token}"}
    known = [post("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port, paths[1], mine) for ip, port in doors]
print("SAID", json.dumps([doors, said, known]))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_cluster_of_ours_is_locked_at_every_port(tmp_path: Path) -> None:
    """For a user without a token one is made, private; there is no dashboard; and at whichever port a stranger posts a job, it is not
    taken. Whoever has the token is let in at one of them, so that the refusals mean something."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(tmp_path)
    }
    command = [sys.executable, "-c", KNOCK, str(tmp_path / "canary")]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500
    )
    assert mode(tmp_path / ".ray" / "auth_token") == 0o600
    doors, said, known = json.loads(done.stdout.partition("SAID")[2] or "null") or pytest.fail(
        done.stdout + done.stderr
    )
    assert len(doors) > 3
    refused = {401, 403}
    assert {status for *_, status in said} & refused
    assert not [
        entry for entry in said if isinstance(entry[-1], int) and entry[-1] not in refused | {404, 405, 415}
    ]
    assert any(isinstance(status, int) and status not in refused | {404, 405, 415} for status in known), known
    assert not (tmp_path / "canary").exists()


LOOK = """
import json, sys
import ray
from ray.util.state import list_actors, list_jobs, list_tasks
ray.init(address=sys.argv[1], log_to_driver=False)
asked = dict(address=sys.argv[2], detail=True, limit=1000, raise_on_missing_output=False)
seen = [[str(entry) for entry in ask(**asked)] for ask in (list_jobs, list_actors, list_tasks)]
print("SEEN", json.dumps(seen))
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
def test_a_run_on_a_cluster_tells_no_secret(
    tmp_path: Path, verb: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that prints all secrets that it can find, has a program print some, and fails with them: none in the run folder, in what
    the driver says, in what the cluster knows of the job, or in Ray's own logs. Nor is the cluster's token. Nodes whose environment
    has no secrets find them in the settings."""
    for name, value in ENVIRONMENT.items() if known else ():
        monkeypatch.setenv(name, value)
    leaky_task(tmp_path, raises=True, past=True)
    argv = [
        *VERBS[verb],
        "--task",
        "leaky:Leaky",
        "--run-dir",
        str(tmp_path / "run"),
        "--data-dir",
        URL if known else PATH,
        *SIZES,
    ]
    with cluster(cpus=2, dashboard=True) as here:
        environment: dict[str, Any] = here.environment | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "orchestrator", *argv, "--ray-address", here.address]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        look = [sys.executable, "-c", LOOK, here.address, f"http://127.0.0.1:{here.dashboard}"]
        seen = subprocess.run(look, env=environment, capture_output=True, text=True, timeout=120)
        shutil.copytree(here.folder / "session_latest" / "logs", tmp_path / "ray")
        token = Path(here.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    said = {
        path.name: path.read_text(errors="replace")
        for place in ("run", "ray")
        for path in (tmp_path / place).rglob("*.*")
    }
    assert done.returncode == (4 if verb == "sweep" else 2), done.stdout + done.stderr
    assert "cannot log in" in (said["sweep.jsonl"] if verb == "sweep" else done.stderr)
    printed = "".join(
        text for name, text in said.items() if name.startswith("worker")
    )  # in Ray's logs, where there is no folder yet
    assert ("printed ***" if known else "printed /data/***") in printed
    assert not known or verb == "sweep" or "past python ***" in printed
    assert "orchestrator" in seen.stdout, seen.stderr
    assert_none_in(tmp_path / "run")
    assert_none_in(done.stdout + done.stderr)
    assert_none_in(seen.stdout.partition("SEEN")[2])
    assert_none_in(tmp_path / "ray")
    written = [path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [text for text in (done.stdout, done.stderr, seen.stdout, *written) if token in text]
