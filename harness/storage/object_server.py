"""A real S3 server in a process of its own, for tests: moto's."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_START_SECONDS = 60
BUCKET = "runs"
PROGRAM = [sys.executable, "-m", "moto.server"]
ACCESS_KEY = "canary-access-key-AKIA7XQ"
SECRET_KEY = "canary-secret-key-91xZ/w+T"


@dataclass(frozen=True)
class ObjectServer:
    """An S3 server with one bucket."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the tools of S3 find the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def client(self) -> Any:
        """Return a client of another library than the one under test."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )

    def keys(self, prefix: str) -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Start a server, and end it afterwards."""
    port = _free_port()
    process = subprocess.Popen(
        [*PROGRAM, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = ObjectServer(f"http://127.0.0.1:{port}")
    try:
        _wait_until_open(process, port)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_open(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the object server has ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the object server did not start within {_START_SECONDS} s")
