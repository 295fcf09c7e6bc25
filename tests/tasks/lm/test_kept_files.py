"""Runs keep the config and the tokenizer of their model: they go on when its folder has moved or changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.lm.language_models import lm_config
from harness.runs.cli_runs import losses
from orchestrator.cli.main import main
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.remote_record import download_record
from orchestrator.run.run_dir import check_links
from orchestrator.storage.folder import open_folder
from orchestrator.tasks.lm.model_folder import (
    KEPT,
    copy_small_files,
    keep_small_files,
    kept_folder,
    load_config,
    load_tokenizer,
)
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.trainer import Trainer

STEPS = 4


def train(config: Config, run_dir: Path, steps: int) -> Path:
    """Train a few steps of a run that has four."""
    given = config.but(run_dir=run_dir, max_steps=steps, schedule="constant", batch_size=6)
    given = given.but(workers=1, gpu_mode="cpu", precision="fp32", trackers=[], log_every=1)
    Trainer(config=given, quiet=True).fit()
    return run_dir


def resume(run_dir: Path, **settings: Any) -> None:
    """Train the rest of a run with the settings of its folder."""
    given = Config.of(resume=str(run_dir), run_dir=run_dir, max_steps=STEPS, **settings)
    Trainer(config=given, quiet=True).fit()


def move_model(config: Config) -> Path:
    """Rename the folder of the model, and return it."""
    folder = Path(str(config.model.model))
    return folder.rename(folder.with_name("moved"))


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    return model(input_ids=torch.arange(20).reshape(2, 10)).logits


@pytest.mark.extended
def test_resume_evaluate_and_export_need_no_files_of_the_model(tmp_path: Path) -> None:
    config = lm_config(tmp_path)
    whole = train(config, tmp_path / "whole", STEPS)
    run = train(config, tmp_path / "run", STEPS // 2)
    assert main(["export", str(whole), str(tmp_path / "expected")]) == 0
    move_model(config)
    resume(run)
    assert losses(run) == losses(whole)
    result = Trainer(quiet=True).evaluate(run)
    assert result.step == STEPS
    assert result.loss == pytest.approx(Trainer(quiet=True).evaluate(whole).loss, rel=1e-6)
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    torch.testing.assert_close(logits(tmp_path / "exported"), logits(tmp_path / "expected"), rtol=0, atol=0)


@pytest.mark.extended
def test_a_config_that_was_changed_later_changes_nothing(tmp_path: Path) -> None:
    config = lm_config(tmp_path)
    run = train(config, tmp_path / "run", STEPS // 2)
    path = Path(str(config.model.model)) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    resume(run)
    assert len(losses(run)) == STEPS


@pytest.mark.extended
def test_without_a_checkpoint_the_weights_are_read_or_missed(tmp_path: Path) -> None:
    config = lm_config(tmp_path)
    folder = Path(str(config.model.model))
    keep_small_files(folder, tmp_path)
    move_model(config)
    task = LanguageModel(config, tmp_path)
    assert task.tokenizer is not None
    with pytest.raises(UserError, match="there is no such folder"):
        task.initialise(task.build_model())


@pytest.mark.extended
def test_adapters_are_resumed_and_merged_with_the_weights_of_their_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = lm_config(tmp_path, lora=4)
    run = train(config, tmp_path / "run", STEPS // 2)
    moved = move_model(config)
    with pytest.raises(UserError, match=r"no such folder.*Checkpoints of adapters .*as --model FOLDER"):
        resume(run)
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge"]) == UserError.exit_code
    assert "--merge adds adapters to the weights of their model" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "adapters")]) == 0
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge", "--model", str(moved)]) == 0
    resume(run, task="lm", model=str(moved))
    assert len(losses(run)) == STEPS


def test_neither_weights_nor_pickles_nor_code_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    kept = {"config.json", "tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}
    others = {
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "a.pkl",
        "modeling.py",
    }
    for name in kept | others:
        (source / name).write_text("{}")
    (source / "folder.json").mkdir()
    os.truncate(source / "merges.txt", 2**27)
    with (source / "data.json").open("wb") as file:
        file.truncate(2**27 + 1)
    keep_small_files(source, tmp_path)
    assert {path.name for path in (tmp_path / KEPT).iterdir()} == kept
    (source / "config.json").write_text("changed")
    keep_small_files(source, tmp_path)
    assert (tmp_path / KEPT / "config.json").read_text() == "{}"
    (tmp_path / "copy").mkdir()
    copy_small_files(source, tmp_path / "copy", without=("config.json",))
    assert not (tmp_path / "copy" / "config.json").exists()


def test_the_kept_files_of_a_remote_run_are_downloaded_without_code(tmp_path: Path) -> None:
    needed = {"hf/config.json", "hf/tokenizer.model", "hf/LICENSE", "hf/vocab.tiktoken"}
    others = {
        "hf/.hidden",
        "hf/deep/config.json",
        "hf/modeling.py",
        "hf/a.pkl",
        "hf/x.json.py",
        "report.html",
    }
    for name in needed | others:
        path = tmp_path / "remote" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    download_record(open_folder("the run folder", (tmp_path / "remote").as_uri()), tmp_path / "copy")
    copied = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").glob("*/*")}
    assert copied == needed


def test_a_link_out_of_the_kept_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / KEPT).mkdir(parents=True)
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "run" / KEPT / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(UserError, match=r"tokenizer.json is a link to .*secret.json"):
        check_links(tmp_path / "run")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a huge file", "the folder"])
def test_kept_files_that_no_run_writes_are_neither_read_nor_exported(tmp_path: Path, kind: str) -> None:
    """A run folder of unknown origin may link to a private key."""
    kept = tmp_path / "run" / KEPT
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    path = kept / "tokenizer.json"
    (tmp_path / "key").write_text("private")
    if kind == "a link":
        path.symlink_to(tmp_path / "key")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a huge file":
        path.touch()
        os.truncate(path, 2**27 + 1)
    else:
        path = kept.rename(tmp_path / "elsewhere")
        kept.symlink_to(path)
        path = kept
    with pytest.raises(UserError, match=rf"{path.name} .*which no run writes.*remove it"):
        kept_folder(tmp_path / "run")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_deep_json_in_a_model_folder_is_refused_in_words(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
    load = load_config if name == "config.json" else load_tokenizer
    with pytest.raises(UserError, match="nested too deeply"):
        load(tmp_path)
