"""Tests of flags: their forms, their origins, and the answers to mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.check import CheckOptions
from orchestrator.cli.evaluate import EvaluateOptions
from orchestrator.cli.init import InitOptions
from orchestrator.cli.plan import PlanOptions
from orchestrator.cli.report import ReportOptions
from orchestrator.cli.watch import WatchOptions
from orchestrator.config.names.aliases import aliases
from orchestrator.config.reading.flags import read_flags, read_options
from orchestrator.config.settings import Config, flat_names, section_types
from orchestrator.errors import UserError
from tests.config.helpers import TYPOS, flag_refusal, read_argv


def test_the_origin_is_the_default_the_line_of_a_file_or_a_flag(config_file: Path):
    config_file.write_text(
        "# head\ntask: text\nrun:\n  epochs: 3\n\n  seed: 5\noptim:\n  learning_rate: 3e-4\n",
        encoding="utf-8",
    )
    resolved = read_argv(
        "--config",
        str(config_file),
        "--seed",
        "7",
        "--no-auto",
        "--width=32",
        "--gpu_mode",
        "cpu",
        "--task",
        "digits",
    )
    assert resolved.origin("epochs") == "file cfg.yaml:4"
    assert resolved.origin("learning_rate") == "file cfg.yaml:8"
    assert resolved.origin("seed") == "flag --seed"
    assert resolved.origin("auto") == "flag --no-auto"
    assert resolved.origin("width") == "flag --width"
    assert resolved.origin("gpu_mode") == "flag --gpu_mode"
    assert resolved.origin("task") == "flag --task"
    assert resolved.origin("precision") == "default"
    assert resolved.config == Config.of(
        epochs=3, seed=7, auto=False, width=32, gpu_mode="cpu", task="digits", learning_rate=3e-4
    )
    assert resolved.origins.keys() <= flat_names().keys()


def test_the_last_config_flag_wins(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("run: {epochs: 3}")
    (tmp_path / "b.yaml").write_text("run: {seed: 3}")
    resolved = read_argv("--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}")
    assert resolved.config == Config.of(seed=3)
    assert resolved.origins == {"seed": "file b.yaml:1"}


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_misspelled_flag_is_answered_with_the_nearest_one(typo: str, meant: str):
    flag_name = meant.replace("_", "-")
    for flag in (f"--{typo}", f"--{typo.replace('_', '-')}"):
        assert flag_refusal(flag, "1") == f"unknown flag {flag} (did you mean --{flag_name}?); see --help"
        assert flag_refusal(f"{flag}=1") == f"unknown flag {flag} (did you mean --{flag_name}?); see --help"


def mutations(name: str) -> Iterator[str]:
    """Yield the name with one letter left out, doubled, or exchanged with the next."""
    for i, letter in enumerate(name):
        yield name[:i] + name[i + 1 :]
        yield name[:i] + letter + name[i:]
        yield name[:i] + name[i + 1 : i + 2] + letter + name[i + 2 :]


@pytest.mark.parametrize("name", flat_names())
def test_every_slip_of_one_letter_is_answered_with_the_setting(name: str):
    for wrong in set(mutations(name)) - {name, *flat_names(), *section_types(), *aliases()}:
        with pytest.raises(UserError, match=rf"\(did you mean --{name.replace('_', '-')}\?\)"):
            read_argv(f"--{wrong}")


def test_flags_take_dashes_and_underscores_and_win_over_the_file(config_file: Path):
    config_file.write_text("run: {epochs: 3}\nmoe: {experts: 4, top_k: 4}\n")
    assert read_argv("--config", str(config_file), "--max_steps", "5", "--top-k", "1").config == Config.of(
        epochs=3, experts=4, top_k=1, max_steps=5
    )


def test_a_file_may_not_name_the_cluster_to_join(config_file: Path):
    """A run shows the user's token to it. A flag is the user's own word, even if a file says the same."""
    config_file.write_text("parallel:\n  ray_address: head.example:6379\n")
    message = flag_refusal("--config", str(config_file))
    assert message.startswith("cfg.yaml:2: ray_address is 'head.example:6379'")
    assert message.endswith("give --ray-address head.example:6379 if you know it")
    for address in ("head.example:6379", "local"):
        assert (
            read_argv("--config", str(config_file), "--ray-address", address).config.parallel.ray_address
            == address
        )
    for address in ("auto", "local"):
        config_file.write_text(f"parallel:\n  ray_address: {address}\n")
        assert read_argv("--config", str(config_file)).config.parallel.ray_address == address


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--expert-hidden-size", "8", "16"], {"expert_hidden_size": (8, 16)}),
        (["--devices", "0,2"], {"devices": (0, 2)}),
        (["--devices", "0", "2"], {"devices": (0, 2)}),
        (["--devices=0,2"], {"devices": (0, 2)}),
        (["--devices=3"], {"devices": (3,)}),
        (["--devices", "0,2", "--workers", "2"], {"devices": (0, 2), "workers": 2}),
        (["--devices", "0,1", "3", "--task", "a,b:C"], {"devices": (0, 1, 3), "task": "a,b:C"}),
        (["--workers", "auto"], {}),
        (
            ["--sharding", "none", "--no-gradient-as-bucket-view"],
            {"sharding": "none", "gradient_as_bucket_view": False},
        ),
        (["--ray_address", "10.0.0.1:6379"], {"ray_address": "10.0.0.1:6379"}),
        (["--trackers", "wandb,mlflow"], {"trackers": ("wandb", "mlflow")}),
        (["--expert-hidden-size=8,16"], {"expert_hidden_size": (8, 16)}),
        (["--trackers"], {"trackers": ()}),
        (["--trackers", "wandb", "mlflow"], {"trackers": ("wandb", "mlflow")}),
        (["--batch-size", "auto"], {"batch_size": "auto"}),
        (["--batch-size", "None"], {}),
        (["--no-auto"], {"auto": False}),
        (["--tf32", "on"], {"tf32": "on"}),
        (["--resume", "auto"], {"resume": "auto"}),
        (["--learning-rate", "3e-4"], {"learning_rate": 3e-4}),
        (
            ["--parallel-strategy", "expert_parallel", "--gate=primary"],
            {"parallel_strategy": "expert_parallel", "gate": "primary"},
        ),
        (
            ["--placement", "a/b.json", "--exchange_chunks", "2"],
            {"placement": "a/b.json", "exchange_chunks": 2},
        ),
        (
            ["--no-normalise-weights", "--gate-scores", "sigmoid"],
            {"normalise_weights": False, "gate_scores": "sigmoid"},
        ),
        (["--compile"], {"compile": "on"}),
        (["--compile", "--epochs", "3"], {"compile": "on", "epochs": 3}),
        (["--no-compile", "--tf32"], {"compile": "off", "tf32": "on"}),
        (["--compile", "auto", "--no_cudnn_benchmark"], {"cudnn_benchmark": "off"}),
        (["--compile=off"], {"compile": "off"}),
        (
            ["--expert-kind", "ffn", "--capacity-factor", "1.25"],
            {"expert_kind": "ffn", "capacity_factor": 1.25},
        ),
    ],
)
def test_flags_of_every_kind(argv: list[str], expected: dict[str, Any]):
    assert read_argv(*argv).config == Config.of(**expected)


@pytest.mark.parametrize(
    "argv", [("--profile", "true"), ("--profile=True",), ("--no-compile", "1"), ("--deterministic", "yes")]
)
def test_a_switch_with_a_value_is_answered_with_its_form(argv: tuple[str, ...]):
    flag = argv[0].partition("=")[0].removeprefix("--no-").removeprefix("--")
    message = flag_refusal(*argv)
    assert "takes no value" in message
    assert message.endswith(f"write --{flag} or --no-{flag}")


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--epochs", "3"]])
def test_the_config_flag_needs_a_path(argv: list[str]):
    assert flag_refusal(*argv) == "--config needs the path of a YAML file"


def test_the_own_flags_of_a_verb_are_suggested_too():
    with pytest.raises(UserError, match=r"unknown flag --jsn \(did you mean --json\?\)"):
        read_flags(PlanOptions, ["--jsn"], "orchestrator plan")
    with pytest.raises(UserError, match=r"unknown flag --ful \(did you mean --full\?\)"):
        read_options(CheckOptions, ["--ful"], "orchestrator check")


def test_options_of_verbs_without_settings(tmp_path: Path):
    assert read_options(CheckOptions, ["--json"], "x") == CheckOptions(json=True)
    assert read_options(InitOptions, ["a.yaml", "--force"], "x", positional="path") == InitOptions(
        Path("a.yaml"), True
    )
    assert read_options(ReportOptions, ["a", "b"], "x", positional="folders") == ReportOptions(
        (Path("a"), Path("b"))
    )


@pytest.mark.parametrize("argv", [["run", "--once"], ["--once", "run"], ["--once", "--folder", "run"]])
def test_a_value_without_a_flag_may_come_last(argv: list[str]) -> None:
    read = read_options(WatchOptions, argv, "x", positional="folder")
    assert read == WatchOptions(Path("run"), once=True)


def test_values_of_flags_are_not_taken_for_values_without_one() -> None:
    options = read_options(WatchOptions, ["--interval", "2", "run"], "x", positional="folder")
    assert options == WatchOptions(Path("run"), interval=2.0)
    reported = read_options(ReportOptions, ["--out", "c", "a", "b"], "x", positional="folders")
    assert reported == ReportOptions((Path("a"), Path("b")), Path("c"))


def test_a_negative_number_is_the_value_of_the_flag_before_it() -> None:
    argv = ["--loader-workers", "-1", "results/run1"]
    options, resolved = read_flags(EvaluateOptions, argv, "x", positional="checkpoint")
    assert options.checkpoint == Path("results/run1")
    assert resolved.config.data.loader_workers == -1
