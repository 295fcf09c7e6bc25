"""Tests of the verbs on a real S3 server."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from harness.runs.small_flags import CPU, SMALL
from harness.storage.object_server import ACCESS_KEY, SECRET_KEY, ObjectServer
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.storage.folder import RemoteFolder
from orchestrator.train.remote.checkpoints import RemoteCheckpoints
from tests.cli.helpers import Call


@pytest.mark.extended
def test_the_command_line_trains_resumes_and_reports_in_s3(
    s3: ObjectServer, call: Call, tmp_path: Path
) -> None:
    url = s3.url(uuid4().hex)
    answer = call("train", *SMALL, *CPU, "--max-steps", "4", "--checkpoint-every", "2", "--run-dir", url)
    assert answer.code == 0, answer
    assert f"uploaded: {url}" in answer.lines
    (first,) = (tmp_path / "results").iterdir()
    answer = call("resume", url, "--max-steps", "8", "--epochs", "100")
    assert answer.code == 0, answer
    assert any(line.startswith("completed: 8 steps") for line in answer.lines), answer
    (second,) = set((tmp_path / "results").iterdir()) - {first}
    assert [event["step"] for event in of_kind(read_events(second / "events.jsonl"), "start")] == [0, 4]
    published = RemoteCheckpoints(RemoteFolder(url) / "checkpoints").newest_first()
    assert published[0].step == 8
    answer = call("report", url)
    assert answer.code == 0
    assert f"wrote {url}/report.html" in answer.lines
    key = f"{url.removeprefix('s3://runs/')}/report.html"
    assert key in s3.keys("")
    # Neither the local copy nor the bucket has the keys.
    stored = [s3.client().get_object(Bucket="runs", Key=key)["Body"].read() for key in s3.keys("")]
    local = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert not any(secret.encode() in content for content in [*stored, *local])
        assert secret not in answer.out + answer.err


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        (("train", "--run-dir", "s3://no-such-bucket/run1"), "cannot write .writable to s3://no-such-bucket"),
        (("train", "--run-dir", "hdfs://bucket/run1"), "hdfs:// is not known here. Installed: file://"),
        (("resume", "s3://runs/nothing"), "s3://runs/nothing holds no run"),
        (("train", "--data-dir", "s3://runs/nothing"), "--data-dir s3://runs/nothing: there is nothing"),
        (("sweep", "--sweep", "workers=1", "--run-dir", "s3://runs/x"), "a folder on a disk was needed"),
        (("train", "--tuned", "s3://runs/x"), "a folder on a disk was needed"),
    ],
)
def test_mistakes_are_told_before_anything_is_created(
    s3: ObjectServer, call: Call, tmp_path: Path, argv: tuple[str, ...], cause: str
) -> None:
    answer = call(*argv, *CPU) if argv[0] != "resume" else call(*argv)
    assert answer.code == 2, answer
    assert cause in answer.lines[0], answer
    assert len(answer.lines) == 1
    assert not list(tmp_path.iterdir())
