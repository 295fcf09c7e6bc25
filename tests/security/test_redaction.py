"""Secrets stay out of what is written and shown: of texts and trees, and of everything that a whole run leaves behind."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestrator.cli.train import TrainOptions
from orchestrator.config.flags import read_flags
from orchestrator.config.reader import Resolved, read_file
from orchestrator.config.writer import dump
from orchestrator.config.settings import Config
from orchestrator.record.events import EventLog, read_events
from orchestrator.record.ledger import LEDGER, Ledger, TrialRow, read_sweep_record
from orchestrator.record.log_copy import copy_masked
from orchestrator.record.screen import Screen
from orchestrator.redaction import (
    MASK,
    MaskedStream,
    secrets_in,
    masked_stream,
    mask,
    mask_error,
    mask_tree,
    secrets_of,
    longest_first,
)
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.files import Contents, load
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.store import CheckpointStore
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.world import World
from orchestrator.train.worker.run_dir import read_earlier_plan, write_config_and_plan
from orchestrator.trainer import Trainer
from tests.support.canaries import CANARIES, ENVIRONMENT, PASSWORD, URL, assert_none_in, leaky_task

ROOT = Path(__file__).resolve().parents[2]
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
SECRETS = secrets_of(ENVIRONMENT)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "WANDB_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "HF_TOKEN",
            "PGPASSWORD",
            "my_secret",
            "AWS_ACCESS_KEY_ID",
            "KEY",
            "RAY_AUTH_TOKEN",
        ),
        *(
            "OPENAI_API_KEY_2",
            "GITHUB_TOKEN_PROD",
            "AZURE_STORAGE_CONNECTION_STRING",
            "SENTRY_DSN",
            "SLACK_WEBHOOK_URL",
            "SECRET_KEY_BASE",
        ),
    ],
)
def test_values_of_telling_names_are_secrets(name: str) -> None:
    assert secrets_of({name: "correct-horse"}) == ("correct-horse",)


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "HOME",
        "MONKEYS",
        "KEYBOARD",
        "TOKENIZERS_PARALLELISM",
        "RAY_AUTH_TOKEN_PATH",
        "CUDA_VISIBLE_DEVICES",
        "MAX_TOKEN_COUNT",
    ],
)
def test_values_of_other_names_are_not(name: str) -> None:
    assert secrets_of({name: "correct-horse"}) == ()


def test_words_of_every_text_are_no_secrets() -> None:
    assert secrets_of({"A_KEY": "", "B_TOKEN": "true", "C_SECRET": "12345"}) == ()


def test_a_password_in_an_address_of_the_environment_is_a_secret_by_itself() -> None:
    secrets = secrets_of({"DATABASE_URL": "postgres://me:p%40ssw0rd%21@db/x"})
    assert mask("login with p@ssw0rd! failed", secrets) == f"login with {MASK} failed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see s3://me:hunter2hunter2@host/x now", "see s3://me:***@host/x now"),
        ("postgres://me:p@ssw0rd@db/x and s3://a:b@h/c", "postgres://me:***@db/x and s3://a:***@h/c"),
        ("postgres://me:p@ss@w0rd@db,redis://:x@y@h", "postgres://me:***@db,redis://:***@h"),
        (str(Path("s3://me:geheim@host/x")), "s3:/me:***@host/x"),
        ("redis://:geheim@h:6379", "redis://:***@h:6379"),
        ("https://h/x?a=1&X-Amz-Signature=abc&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://h/?token=abc", "https://h/?token=***"),
        ("https://host:8265/a@b", "https://host:8265/a@b"),
        ("http://me@host/x", "http://me@host/x"),
        (
            "Protocol=https;AccountName=me;AccountKey=abc/d+e==;Suffix=x",
            "Protocol=https;AccountName=me;AccountKey=***;Suffix=x",
        ),
        ("{'Authorization': 'Bearer abc.def', 'x': 1}", "{'Authorization': 'Bearer ***', 'x': 1}"),
        ("authorization: Basic bWU6eA==", "authorization: Basic ***"),
        ("PROXY-AUTHORIZATION: BEARER abc.def", "PROXY-AUTHORIZATION: BEARER ***"),
        ("HTTP_aUTHORIZATION='Token abc'", "HTTP_aUTHORIZATION='Token ***'"),
        ("loss = 3 ? key: value & more", "loss = 3 ? key: value & more"),
    ],
)
def test_addresses(text: str, expected: str) -> None:
    assert mask(text) == expected


@pytest.mark.parametrize(
    "piece",
    ["a:/b:", "a:/b:c@", "a://", "?a.b-c_", "&token", "authorization: ", "x@", "a:/:@", ":", "http://u:p@h@"],
    ids=repr,
)
@pytest.mark.timeout(30)
def test_a_long_line_is_gone_through_once(piece: str) -> None:
    """Not again from each of its letters, which would take hours."""
    mask(piece * (1_000_000 // len(piece)), SECRETS)


def test_secrets_that_a_tree_holds_are_told_in_all_their_forms() -> None:
    tree = {"data": {"data_dir": f"/data/{CANARIES[3]}", "n": 3}, "origins": [f"file {CANARIES[0]}:3", None]}
    held = secrets_in(tree, SECRETS)
    assert set(held) == set(secrets_of({"A_KEY": CANARIES[0], "B_KEY": CANARIES[3]}))
    assert secrets_in({"data_dir": "/plain"}, SECRETS) == ()


def test_secrets_of_two_environments_are_one_list() -> None:
    assert longest_first(("abcdefgh",), ("abcdefghi", "abcdefgh")) == ("abcdefghi", "abcdefgh")


def test_the_longer_secret_goes_first() -> None:
    secrets = secrets_of({"A_KEY": "abcdef", "B_KEY": "abcdefghi"})
    assert mask("abcdefghi abcdef", secrets) == "*** ***"


def test_numbers_stay_what_they_are() -> None:
    secrets = secrets_of({"PIN_SECRET": "123456"})
    tree = {"loss": 0.123456, "step": 123456, "note": "123456", "123456": [("123456", None)]}
    assert mask_tree(tree, secrets) == {"loss": 0.123456, "step": 123456, "note": MASK, MASK: [[MASK, None]]}


def test_a_record_holds_no_secret_and_stays_whole(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    log = EventLog(tmp_path / "events.jsonl", [seen.append], SECRETS)
    for number, canary in enumerate(CANARIES):
        log.write(
            "warning",
            kind=canary,
            message=f'"{canary}" and {URL}',
            step=number,
            more={"a": [canary]},
            metrics={canary: 0.5},
        )
    log.close()
    assert_none_in(tmp_path)
    assert_none_in(json.dumps(seen))
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == list(range(len(CANARIES)))


WORDS = {
    "SORT_KEY": "position",
    "GROUP_KEY": "samples",
    "PARTITION_KEY": "progress",
    "STEP_TOKEN": "weight",
    "A_SECRET": "optimizer",
    "B_SECRET": "evaluate",
    "C_SECRET": "settings",
    "D_SECRET": "batch_size",
    "E_SECRET": "choices",
}
"""Values that are parts of names of ours."""


def test_a_word_that_is_a_secret_leaves_our_own_names_alone(tmp_path: Path) -> None:
    secrets = secrets_of(WORDS)
    log = EventLog(tmp_path / "events.jsonl", secrets=secrets)
    log.write(
        "evaluate",
        step=3,
        samples=8,
        position=2,
        metrics={"weight": 1.5},
        memory={"samples": 3},
        note="sort by position",
    )
    log.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["event"], event["step"], event["samples"], event["position"]) == ("evaluate", 3, 8, 2)
    assert (event["metrics"], event["memory"], event["note"]) == (
        {MASK: 1.5},
        {"samples": 3},
        f"sort by {MASK}",
    )


def test_a_word_that_is_a_secret_spoils_no_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, secrets_of(WORDS))
    ledger.begin({"settings": {"batch_size": 4}})
    ledger.add(TrialRow(1, {"batch_size": 4}, "failed", "no position"))
    ledger.close()
    record = read_sweep_record(tmp_path)
    assert record.header["settings"] == record.rows[0].point == {"batch_size": 4}
    assert record.rows[0].reason == f"no {MASK}"


def test_a_ledger_holds_no_secret(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SECRETS)
    ledger.begin({"settings": {"data_dir": URL}, "task": CANARIES[0]})
    ledger.add(TrialRow(1, {"batch_size": 4}, "failed", f"cannot log in with {CANARIES[1]}"))
    ledger.close()
    assert_none_in((tmp_path / LEDGER).read_text())


def test_a_config_holds_no_secret_and_reads_back(tmp_path: Path) -> None:
    config = Config.of(data_dir=f"/data/{CANARIES[0]}", resume=f"/r/{CANARIES[1]}", epochs=7)
    path = tmp_path / "c.yaml"
    path.write_text(dump(Resolved(config, {"epochs": f"file {CANARIES[2]}:3"}), secrets=SECRETS))
    assert_none_in(path.read_text())
    assert str(read_file(path).config.data.data_dir) == f"/data/{MASK}"
    assert read_file(path).config.run.epochs == 7


def test_an_error_keeps_its_class_and_loses_its_secrets() -> None:
    try:
        try:
            raise KeyError(CANARIES[0])
        except KeyError as cause:
            raise ValueError(f"no login at {URL}", 7) from cause
    except ValueError as error:
        mask_error(error, SECRETS)
        caught = error
    assert caught.args == ("no login at " + URL.replace(PASSWORD, MASK), 7)
    assert caught.__cause__ is not None
    assert caught.__cause__.args == (MASK,)


def test_what_an_error_shows_beside_its_words_is_masked() -> None:
    failed = subprocess.CalledProcessError(
        1, ["git", "clone", URL], output=CANARIES[0].encode(), stderr=CANARIES[1]
    )
    missing = FileNotFoundError(2, "No such file or directory", f"/data/{CANARIES[2]}")
    missing.add_note(f"tried {CANARIES[3]}")
    group = ExceptionGroup("both", [failed, missing])
    mask_error(group, SECRETS)
    shown = "".join(traceback.format_exception(group))
    assert_none_in(shown + str(failed.cmd) + str(failed.output) + str(failed.stderr) + str(group.args))
    assert "No such file or directory: '/data/***'" in shown
    assert "returned non-zero exit status 1" in shown
    assert (missing.errno, failed.returncode) == (2, 1)


def test_what_is_no_text_in_an_error_stays() -> None:
    array, inner = np.ones(2), object()
    error = ValueError(array, 7, (inner, CANARIES[0]))
    error.more = array  # pyright: ignore[reportAttributeAccessIssue]
    mask_error(error, SECRETS)
    assert error.args[0] is array
    assert error.args[1:] == (7, (inner, MASK))


def test_bytes_beneath_a_stream_are_masked_too() -> None:
    under = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = MaskedStream(under, SECRETS)
    stream.buffer.write(f"{CANARIES[4]} \xff".encode())
    stream.buffer.flush()
    assert under.buffer.getvalue() == f"{MASK} \xff".encode()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def learning() -> TrainState:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, Precision("fp32", torch.device("cpu")))


def saved(folder: Path, state: TrainState, progress: Progress) -> Contents:
    contents = capture(state, progress, World.single_process())
    assert contents is not None
    return load(CheckpointStore(folder).save(progress.step, contents))


def test_a_checkpoint_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning: Any) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    found = saved(tmp_path, learning, Progress(step=3, validation=dict.fromkeys(CANARIES, 1.5)))
    assert_none_in(tmp_path)
    assert found.state["progress"]["validation"] == {MASK: 1.5}


def test_a_word_that_is_a_secret_spoils_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning: Any
) -> None:
    for name, value in WORDS.items():
        monkeypatch.setenv(name, value)
    was = Progress(step=3, position=5, samples=40, validation={"loss": 0.5})
    assert restore(saved(tmp_path, learning, was), learning) == was


def test_a_word_that_is_a_secret_spoils_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen is found again when the run goes on."""
    for name, value in WORDS.items():
        monkeypatch.setenv(name, value)
    argv = ["--task", "synthetic", *SIZES, "--gpu-mode", "cpu", "--run-dir", str(tmp_path / "run")]
    prepared = Trainer(config=read_flags(TrainOptions, argv, "orchestrator train")[1]).prepare()
    (tmp_path / "run").mkdir()
    write_config_and_plan(prepared, tmp_path / "run", {})
    assert read_earlier_plan(tmp_path / "run")["batch_size"] == 8


def test_secrets_of_who_asks_are_masked_where_they_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node whose environment has none of them."""
    with monkeypatch.context() as here:
        for name, value in ENVIRONMENT.items():
            here.setenv(name, value)
        argv = [
            "--task",
            "synthetic",
            *SIZES,
            "--gpu-mode",
            "cpu",
            "--data-dir",
            f"/data/{CANARIES[3]}",
            "--run-dir",
            "/r/" + CANARIES[4],
        ]
        prepared = (
            Trainer(config=read_flags(TrainOptions, argv, "orchestrator train")[1]).prepare().with_secrets()
        )
    assert set(prepared.secrets) == set(secrets_of({"A_KEY": CANARIES[3], "B_KEY": CANARIES[4]})), (
        "those that it holds, and no others"
    )
    write_config_and_plan(prepared, tmp_path, {})
    log = EventLog(tmp_path / "events.jsonl", secrets=prepared.hidden)
    log.write("warning", kind="data", message=f"nothing in /data/{CANARIES[3]}")
    log.close()
    assert_none_in(tmp_path)
    assert f"/data/{MASK}" in (tmp_path / "config.yaml").read_text()


def test_what_a_process_says_is_masked_once() -> None:
    under = io.StringIO()
    stream = masked_stream(under, SECRETS)
    assert masked_stream(stream, ()) is stream
    print(CANARIES[0], file=stream)
    assert under.getvalue() == f"{MASK}\n"


def test_a_stream_masks_and_is_the_stream() -> None:
    under = io.StringIO()
    stream = MaskedStream(under, SECRETS)
    print(CANARIES[0], URL, file=stream)  # pyright: ignore[reportArgumentType]
    stream.writelines([CANARIES[1], "\n"])
    assert_none_in(under.getvalue())
    assert not stream.isatty()


def test_a_screen_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(secrets=SECRETS)
    screen.note(f"no login with {CANARIES[0]}")
    screen.banner([("data", URL)], "x")
    assert_none_in(capsys.readouterr().out)


def test_a_log_is_copied_without_secrets(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    log.write_bytes(b"\xff\xfe plain\r\n" + CANARIES[3].encode() + b"\nno end " + URL.encode())
    copy_masked(log, tmp_path / "copy.log", SECRETS)
    assert CANARIES[3] in log.read_text(errors="replace")
    copy_masked(log, log, SECRETS)
    assert_none_in(tmp_path)
    assert log.read_bytes().startswith(b"\xff\xfe plain\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.log", "worker_0.log"]


def test_a_log_without_secrets_is_not_written_anew(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    log.write_text("plain\n")
    before = log.stat().st_ino
    copy_masked(log, log, SECRETS)
    assert log.stat().st_ino == before


def test_every_record_is_opened_with_the_secrets() -> None:
    """A log that is not told them would write them."""
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "orchestrator").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("EventLog", "Ledger", "write_file", "SweepScreen")
        if "secret" not in ast.unparse(node)
    ]
    assert not bare


def test_a_run_that_tells_everything_leaves_no_secret(tmp_path: Path) -> None:
    """Printed, warned of, in a metric's name, in a setting, in the error that ends it: not one is found afterwards, nor in the
    checkpoints."""
    leaky_task(tmp_path, raises=True)
    argv = [
        "--task",
        "leaky:Leaky",
        "--run-dir",
        "run",
        "--data-dir",
        URL,
        "--max-steps",
        "30",
        "--log-every",
        "1",
        "--checkpoint-every",
        "4",
        "--evaluate-every",
        "2",
        "--gpu-mode",
        "cpu",
        *SIZES,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "train", *argv],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot log in" in done.stderr
    assert "printed" in done.stdout
    run = tmp_path / "run"
    assert {"config.yaml", "plan.json", "events.jsonl", "report.html", "summary.json", "tensorboard"} <= {
        p.name for p in run.iterdir()
    }
    assert "cannot log in" in (run / "report.html").read_text()
    assert MASK in (run / "config.yaml").read_text()
    assert MASK in (run / "checkpoints" / "step_00000004" / "state.json").read_text()
    assert_none_in(run)
    assert_none_in(done.stdout + done.stderr)
