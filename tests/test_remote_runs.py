"""Tests of whole runs in remote folders: training, resuming elsewhere, failing uploads, secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from harness.faults.remote_kills import kill_and_resume
from harness.runs.blob_trainers import blobs, cross_entropy, settings
from harness.runs.records import by_step
from harness.storage.object_server import ObjectServer
from orchestrator import Config, Result, Trainer, read_run
from orchestrator.config.reading.reader import read_file as read_config
from orchestrator.errors import OrchestratorError, TrainingFailed, UserError
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.storage import folder as storage_folder
from orchestrator.storage.address import as_url
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote import mirror
from orchestrator.train.remote.checkpoints import RemoteCheckpoints


@pytest.fixture
def url() -> str:
    return f"memory://{uuid4().hex}/run1"


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mirror, "_LOOK_SECONDS", 0.01)


def remote_settings(url: str, **changes: Any) -> Config:
    return settings(Path("unused"), run_dir=url, **changes)


def fit(url: str, quiet: bool = True, **changes: Any) -> Result:
    return make_trainer(remote_settings(url, **changes), quiet=quiet).fit()


def make_trainer(
    config: Config, loss: Callable[[Any, Any], Any] = cross_entropy, quiet: bool = True
) -> Trainer:
    torch.manual_seed(0)
    return Trainer(nn.Linear(4, 3), data=blobs(320), loss=loss, config=config, quiet=quiet)


def published(url: str) -> list[int]:
    checkpoints = RemoteCheckpoints(RemoteFolder(url) / "checkpoints")
    return [checkpoint.step for checkpoint in checkpoints.newest_first()]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in by_step(read_events(folder / "events.jsonl"))]


def local_run(tmp_path: Path, **changes: Any) -> list[float]:
    make_trainer(settings(tmp_path, **changes)).fit()
    return losses(tmp_path / "run")


# Training and resuming


def test_a_run_is_in_the_remote_folder_and_no_folder_is_named_like_the_address(
    url: str, tmp_path: Path
) -> None:
    result = fit(url, max_steps=8, checkpoint_every=2)
    assert not list(tmp_path.glob("memory*"))
    names = set(RemoteFolder(url).files())
    assert {"events.jsonl", "config.yaml", "plan.json", "summary.json", "report.html"} <= names
    assert "remote" not in names
    assert published(url)[0] == 8
    summary = json.loads(RemoteFolder(url).read("summary.json", 2**20) or b"")
    assert summary["status"] == "completed"
    assert summary["uploaded_step"] == 8
    assert RemoteFolder(url).read("events.jsonl", 2**24) == (result.run_dir / "events.jsonl").read_bytes()


def test_an_upload_event_follows_the_manifest(url: str) -> None:
    result = fit(url, max_steps=8, checkpoint_every=4)
    uploads = of_kind(read_events(result.run_dir / "events.jsonl"), "upload")
    assert uploads[-1]["step"] == 8
    assert uploads[-1]["path"] == "checkpoints/step_00000008"
    assert uploads[-1]["bytes"] > 0


def test_a_run_resumed_in_another_folder_has_the_losses_of_one_never_stopped(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = local_run(tmp_path / "local", max_steps=12, schedule="constant", warmup_steps=0)
    fit(url, max_steps=7, checkpoint_every=3, schedule="constant", warmup_steps=0)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    result = fit(url, max_steps=12, resume="auto", schedule="constant", warmup_steps=0)
    assert result.run_dir.is_relative_to(other)
    assert losses(result.run_dir) == whole
    assert list(read_run(url)["loss"]) == whole
    starts = of_kind(read_events(result.run_dir / "events.jsonl"), "start")
    assert [start["step"] for start in starts] == [0, 7]


def test_the_settings_of_a_resumed_run_are_those_of_the_remote_folder(url: str) -> None:
    fit(url, max_steps=4, learning_rate=1e-4)
    result = fit(url, max_steps=6, resume="auto")
    steps = by_step(read_events(result.run_dir / "events.jsonl"))
    assert max(step["lr"] for step in steps) <= 1e-4
    assert "config.001.yaml" in RemoteFolder(url).files()


def test_a_resumed_run_keeps_as_many_checkpoints_as_its_folder_says(url: str) -> None:
    for steps in (2, 4, 6, 8, 10):
        changes: dict[str, Any] = {"keep": 5} if steps == 2 else {}
        fit(url, max_steps=steps, resume="auto", **changes)
    assert published(url) == [10, 8, 6, 4, 2]


def test_a_plan_leaves_the_run_in_its_remote_folder(url: str) -> None:
    prepared_and_trained = make_trainer(remote_settings(url, max_steps=2))
    prepared_and_trained.prepare()
    assert RemoteFolder(url).files() == {}
    prepared_and_trained.fit()
    assert published(url) == [2]


def test_a_second_fit_of_a_trainer_finds_its_remote_folder(url: str) -> None:
    trained_twice = make_trainer(remote_settings(url, max_steps=2))
    trained_twice.fit()
    with pytest.raises(UserError, match=f"{url} holds a run already"):
        trained_twice.fit()


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(url, max_steps=4)
    fit(url, max_steps=8, resume="auto")
    assert published(url) == [8, 4]
    RemoteFolder(url).write("checkpoints/step_00000008/model_00000.safetensors", b"damaged")
    result = fit(url, quiet=False, max_steps=10, resume="auto")
    assert "skipped checkpoint step_00000008" in " ".join(capsys.readouterr().out.split())
    starts = of_kind(read_events(result.run_dir / "events.jsonl"), "start")
    assert starts[-1]["step"] == 4
    assert 8 not in published(url)
    assert published(url)[0] == 10


@pytest.mark.parametrize("answer", ["refused", "gone"])
def test_manifests_that_cannot_be_read_end_the_start_and_change_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    fit(url, max_steps=4)
    fit(url, max_steps=8, resume="auto")
    before = (RemoteFolder(url).files(), set(tmp_path.rglob("*")))
    read = MemoryFileSystem.info

    def refuse(self: MemoryFileSystem, path: str, **arguments: Any) -> Any:
        if path.endswith("manifest.json"):
            raise PermissionError(path) if answer == "refused" else FileNotFoundError(path)
        return read(self, path, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "info", refuse)
        with pytest.raises(RemoteError, match=r"cannot read step_00000008/manifest\.json"):
            fit(url, max_steps=10, resume="auto")
    assert (RemoteFolder(url).files(), set(tmp_path.rglob("*"))) == before
    assert published(url) == [8, 4]


def test_a_folder_that_holds_a_run_is_not_begun_again(url: str, tmp_path: Path) -> None:
    fit(url, max_steps=2)
    before = set(tmp_path.rglob("*"))
    call = f"Trainer(..., config=Config.of(resume='auto', run_dir='{url}')).fit()"
    with pytest.raises(UserError, match=re.escape(f"{url} holds a run already; continue it with {call}, or")):
        fit(url, max_steps=4)
    task = Config.of(task="digits", run_dir=url)
    with pytest.raises(UserError, match=f"continue it with orchestrator resume {url}, or"):
        Trainer(config=task, quiet=True).fit()
    assert set(tmp_path.rglob("*")) == before


def test_resume_auto_begins_a_run_where_there_is_none(url: str) -> None:
    assert fit(url, max_steps=2, resume="auto").summary["steps"] == 2


def test_a_run_begins_with_the_weights_or_the_state_of_a_remote_checkpoint(url: str, tmp_path: Path) -> None:
    fit(url, max_steps=4)
    settings_of = {"max_steps": 6, "schedule": "constant"}
    for number, start in enumerate((url, f"{url}/checkpoints/step_00000004")):
        config = settings(tmp_path / f"resumed{number}", resume=start, **settings_of)
        result = make_trainer(config).fit()
        assert of_kind(read_events(result.run_dir / "events.jsonl"), "resume")[0]["step"] == 4
        assert read_config(result.run_dir / "config.yaml").config.checkpoint.resume == start
    checkpoint = f"{url}/checkpoints/step_00000004"
    config = settings(tmp_path / "new", init_from=checkpoint, max_steps=2)
    result = make_trainer(config).fit()
    (resumed,) = of_kind(read_events(result.run_dir / "events.jsonl"), "resume")
    assert (resumed["weights_only"], resumed["path"]) == (True, checkpoint)
    written = read_config(result.run_dir / "config.yaml").config.checkpoint.init_from
    assert as_url(written) == checkpoint
    assert ".downloaded-" not in (result.run_dir / "plan.json").read_text()
    assert not list(tmp_path.rglob(".downloaded-*"))


def test_errors_of_a_start_from_a_remote_run_name_its_address(url: str, tmp_path: Path) -> None:
    fit(url, max_steps=4)
    for start in (url, f"{url}/checkpoints/step_00000004"):
        for flag in ("resume", "init_from"):
            config = settings(tmp_path / "other", max_steps=6, **{flag: start})
            with pytest.raises(OrchestratorError) as raised:
                Trainer(nn.Linear(4, 5), data=blobs(320), loss=cross_entropy, config=config, quiet=True).fit()
            assert flag == "init_from" or url in str(raised.value)
            assert ".downloaded-" not in str(raised.value)


# Places that cannot be written, and uploads that fail


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*Check the name of the bucket"):
        fit(f"file://{tmp_path}/file/run1", max_steps=2)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_a_working_folder_that_cannot_be_written_is_refused(url: str, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file in the way")
    with pytest.raises(UserError, match="a run with a remote folder works in a local one"):
        fit(url, max_steps=2)


def failing(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    """Let that many uploads fail before one succeeds."""
    upload = RemoteFolder.upload
    left = num_failures

    def fail(self: RemoteFolder, source: Path, name: str, *rest: Any) -> None:
        nonlocal left
        if left:
            left -= 1
            raise RemoteError(f"cannot write {name}: the storage is down")
        upload(self, source, name, *rest)

    monkeypatch.setattr(RemoteFolder, "upload", fail)
    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)


def test_a_failing_upload_is_tried_again_and_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 3)
    result = fit(url, max_steps=6)
    events = read_events(result.run_dir / "events.jsonl")
    warnings = [event["message"] for event in of_kind(events, "warning") if event["kind"] == "upload"]
    assert "the storage is down" in warnings[0]
    assert of_kind(events, "upload")[-1]["step"] == 6
    assert result.status == "completed"
    assert published(url) == [6]


def test_an_upload_that_fails_for_good_is_the_end_status_of_the_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 10**6)
    with pytest.raises(
        TrainingFailed, match=f"its upload to {url} failed 6 times .*the storage is down"
    ) as failed:
        fit(url, max_steps=6)
    assert "not uploaded: checkpoints/step_00000006, " in str(failed.value)
    (folder,) = (tmp_path / "results").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert f"its upload to {url} failed" in summary["reason"]
    assert summary["steps"] == 6
    events = read_events(folder / "events.jsonl")
    warnings = [event["message"] for event in of_kind(events, "warning") if event["kind"] == "upload"]
    assert any("UPLOADS FAIL: 5 in a row, no checkpoint is there" in message for message in warnings)
    assert not of_kind(events, "upload")
    # The run itself is whole, and on this machine.
    assert (folder / "checkpoints" / "step_00000006" / "manifest.json").exists()


def test_a_resumed_run_whose_uploads_fail_names_the_checkpoint_that_is_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(url, max_steps=4)
    monkeypatch.setattr(RemoteCheckpoints, "upload", refuse_upload)
    monkeypatch.setattr(storage_folder, "_FIRST_WAIT_SECONDS", 0.001)
    with pytest.raises(TrainingFailed, match="failed 6 times"):
        fit(url, max_steps=6, resume="auto")
    messages = [
        event["message"]
        for folder in (tmp_path / "results").iterdir()
        for event in of_kind(read_events(folder / "events.jsonl"), "warning")
    ]
    assert any("UPLOADS FAIL: 5 in a row, the newest checkpoint there is of step 4" in m for m in messages)
    assert published(url) == [4]


def refuse_upload(*_: object) -> None:
    raise RemoteError("the storage is down")


def test_what_a_failed_run_has_saved_is_uploaded(url: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 30:
            raise ValueError("broken at last")
        return cross_entropy(model, batch)

    num_calls = 0
    with pytest.raises(Exception, match="broken at last"):
        make_trainer(remote_settings(url, checkpoint_every=2), loss).fit()
    assert published(url)
    assert json.loads(RemoteFolder(url).read("summary.json", 2**20) or b"")["status"] == "failed"


# Kills


def check_kills(s3: ObjectServer, folder: Path, num_kills: int, seed: int) -> None:
    runs = kill_and_resume(s3, folder, num_kills, seed)
    assert runs.acknowledged > 0
    # Some runs are killed before they begin; the last one is not killed.
    assert runs.begun_at
    for acknowledged, begun in runs.begun_at:
        assert begun >= acknowledged, runs.begun_at
    # A step that was repeated has the loss that it had before, to the last bit.
    assert all(len(values) == 1 for values in runs.losses.values())
    assert sorted(runs.losses) == list(range(1, max(runs.losses) + 1))


@pytest.mark.extended
def test_three_kills_lose_nothing_that_was_acknowledged(s3: ObjectServer, tmp_path: Path) -> None:
    check_kills(s3, tmp_path, num_kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1])
def test_twenty_kills_lose_nothing_that_was_acknowledged(s3: ObjectServer, tmp_path: Path, seed: int) -> None:
    check_kills(s3, tmp_path, num_kills=20, seed=seed)
