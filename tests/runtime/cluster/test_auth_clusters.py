"""Tests of clusters that require a token, and of open ones: dashboards, ports, and how they are joined."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.hosts.cluster import RayCluster, local_cluster

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[3]


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


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def locked() -> Iterator[RayCluster]:
    """A cluster that requires a token."""
    with local_cluster(cpus=1, dashboard=True) as started:
        yield started


@pytest.mark.extended
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


def test_a_cluster_that_requires_a_token_is_joined_with_it(shared_cluster: RayCluster) -> None:
    """Ray itself would present none for an address that is given. Afterwards the mode is as before."""
    environment = {
        name: value for name, value in shared_cluster.environment.items() if name != "RAY_AUTH_MODE"
    }
    result = join(shared_cluster.address, environment)
    assert result.stdout.split("\n")[:2] == ["joined token", "left None"], result.stdout + result.stderr


@pytest.mark.slow
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
