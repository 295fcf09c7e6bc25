"""``orchestrator export``: runs of the Python API as folders that ``transformers`` loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from experts.transformers.registration import expert_loads, use
from harness.lm.families import build, tokens
from orchestrator import Config, Task, Trainer
from orchestrator.cli.main import main
from orchestrator.errors import UserError
from orchestrator.tasks.task import Loss, TensorData


@dataclass(frozen=True)
class TinyQwen(Task):
    """A tiny Qwen3-MoE in fp32."""

    def build_model(self) -> nn.Module:
        return use(build("Qwen3-MoE", torch.float32))

    def train_data(self) -> TensorData:
        return TensorData(tokens(12))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor]) -> Loss:
        (ids_BT,) = batch
        logits = model(input_ids=ids_BT[:, :-1]).logits
        targets = ids_BT[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return Loss(total, targets.numel(), {}, expert_loads(model))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A run of three steps with an average of its weights, and its trained model."""
    folder = tmp_path_factory.mktemp("run")
    config = Config.of(
        run_dir=folder / "run",
        max_steps=3,
        batch_size=4,
        learning_rate=0.02,
        ema_decay=0.5,
        precision="fp32",
        gpu_mode="cpu",
        workers=1,
    )
    result = Trainer(task=TinyQwen(), config=config, quiet=True).fit()
    eager = build("Qwen3-MoE", torch.float32)
    eager.config._experts_implementation = None
    eager.save_pretrained(folder / "model")
    return folder, result.model


def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=tokens(2)).logits


def test_the_exported_model_has_the_logits_of_the_trained_one(
    run: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trained = run
    target = tmp_path / "exported"
    flags = ["--model", str(folder / "model"), "--dtype", "fp32", "--shard-size", "20KB"]
    assert main(["export", str(folder / "run"), str(target), *flags]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto", experts_implementation="eager")
    torch.testing.assert_close(logits(loaded), logits(trained), rtol=0, atol=1e-6)
    assert len(list(target.glob("*.safetensors"))) > 1
    shown = capsys.readouterr().out
    assert "exported " in shown
    assert "step_00000003 (the newest of the run, which has no validation result): the weights\n" in shown
    assert f"wrote {target}: " in shown


def test_the_average_is_another_model(run: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, trained = run
    target = tmp_path / "averaged"
    source = ["--model", str(folder / "model")]
    assert main(["export", str(folder / "run"), str(target), "--weights", "ema", *source]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(target, experts_implementation="eager")
    assert not torch.allclose(logits(loaded), logits(trained), rtol=0, atol=1e-4)


MISTAKES = [
    ((), "which checkpoint? Give both: orchestrator export RUN_OR_CHECKPOINT DIR"),
    (("RUN",), "which folder to write? Give both"),
    (("RUN", "DIR"), "whose model is not known as one of transformers"),
    (("RUN", "DIR", "--model", "/nowhere"), "there is no such folder; give a folder with config.json"),
    (("RUN", "DIR", "--model", "MODEL", "--shard-size", "large"), "--shard-size is 'large'; give a size as"),
    (("RUN", "MODEL", "--model", "MODEL"), "exists and is not empty; choose another folder"),
    (("DIR", "DIR2"), "there is no such folder"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_answered_in_one_line(
    run: tuple[Path, nn.Module],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    folder, _ = run
    paths = {"RUN": folder / "run", "MODEL": folder / "model", "DIR": tmp_path / "a", "DIR2": tmp_path / "b"}
    assert main(["export", *(str(paths.get(word, word)) for word in arguments)]) == UserError.exit_code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "a").exists()
