"""The task lm with frozen weights in 4 bits, from its files to the exported model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from experts.kernels.packed import PackedForm
from experts.moe.bank import named_banks
from experts.transformers.files.shards import SINGLE_FILE
from experts.types import Packing
from harness.lm.language_models import FilledLanguageModel, lm_config
from harness.lm.quantised_files import quantise_folder
from harness.runs.steppers import make_stepper, mean_loss, run_steps
from harness.storage.checkpoints import save_checkpoint
from orchestrator.checkpoint.files import Contents, load
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.tasks.lm.building import lora_options
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.restore import restore_model
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.device.precision import Precision
from orchestrator.train.export.adapters import AdaptedModel, export_merged
from orchestrator.train.export.weights import ExportForm
from orchestrator.train.group.world import World

CPU = torch.device("cpu")
PACKINGS: list[Packing] = ["nf4", "int8"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return lm_config(tmp_path_factory.mktemp("lm"), lora=4, frozen_weights="nf4")


def unpacked_copy(config: Config, packing: Packing, folder: Path) -> Config:
    """Return settings without packing for files with the numbers that packed weights stand for."""
    shutil.copytree(str(config.model.model), folder)
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            form = PackedForm(packing, *tensor.shape)
            tensors[name] = form.unpack(form.pack(tensor), torch.float32)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    return config.but(model=str(folder), frozen_weights="auto")


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_is_that_of_files_with_the_unpacked_numbers(
    config: Config, packing: Packing, tmp_path: Path
) -> None:
    losses: list[list[float]] = []
    whole = unpacked_copy(config, packing, tmp_path / "whole")
    for settings in (config.but(frozen_weights=packing), whole):
        stepper, feed = make_stepper(FilledLanguageModel(settings), 2, 4)
        losses.append([mean_loss(totals) for totals in run_steps(stepper, feed, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_files_of_bitsandbytes_train_and_merge_as_the_weights_that_they_were_made_from(
    config: Config, tmp_path: Path
) -> None:
    """Their bytes are those that packing gives, and the merged model is whole."""
    folder = tmp_path / "nf4"
    quantise_folder(Path(str(config.model.model)), folder)
    merged: list[dict[str, torch.Tensor]] = []
    losses: list[list[float]] = []
    for number, settings in enumerate((config, config.but(model=str(folder)))):
        stepper, feed = make_stepper(FilledLanguageModel(settings), 2, 4)
        losses.append([mean_loss(totals) for totals in run_steps(stepper, feed, 3)])
        target = tmp_path / f"merged_{number}"
        checkpoint = saved(stepper.strategy.model, tmp_path / f"run_{number}")
        merge(checkpoint, settings, target)
        merged.append(load_file(target / SINGLE_FILE))
        assert "quantization_config" not in (target / "config.json").read_text()
    assert losses[0] == losses[1]
    assert merged[0].keys() == merged[1].keys()
    assert [name for name, tensor in merged[0].items() if not torch.equal(merged[1][name], tensor)] == []


@pytest.mark.extended
def test_the_plan_counts_the_numbers_and_the_packed_bytes(config: Config) -> None:
    packed = model_facts(LanguageModel(config), "cpu", "fp32")
    whole = model_facts(LanguageModel(config.but(frozen_weights="auto")), "cpu", "fp32")
    for name in (
        "parameters",
        "trainable",
        "expert_parameters",
        "frozen_experts",
        "unsaved",
        "expert_weights",
    ):
        assert getattr(packed, name) == getattr(whole, name), name
    model = LanguageModel(config).build_model()
    assert packed.weight_bytes * packed.parameters == pytest.approx(sum(p.nbytes for p in model.parameters()))
    assert packed.expert_weight_bytes < whole.expert_weight_bytes == 4.0
    assert packed.expert_weight_bytes * packed.expert_parameters == pytest.approx(
        sum(p.nbytes for name, p in model.named_parameters() if ".bank." in name)
    )
    largest = 2 * 12 * 16  # the first matrix of an expert
    assert packed.unpacked_bytes == 8 * largest
    on_gpu = model_facts(LanguageModel(config), "cuda", "bf16")
    experts = max(len(bank.held) for _, bank in named_banks(model))
    assert on_gpu.unpacked_bytes == 2 * experts * largest, "one kernel unpacks all experts of a layer"


def trained(config: Config) -> nn.Module:
    stepper, feed = make_stepper(FilledLanguageModel(config), 2, 4)
    list(run_steps(stepper, feed, 2))
    return stepper.strategy.model


def saved(model: nn.Module, folder: Path) -> Path:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    state = TrainState(model, optimizer, Precision("fp32", CPU))
    part = capture(state, Progress(step=2), World.single_process(), PinnedBuffers(CPU, 1)).part
    assert part.state is not None
    return save_checkpoint(CheckpointStore(folder), 2, Contents(part.tensors, part.state))


def merge(checkpoint: Path, settings: Config, target: Path) -> None:
    options, folder = lora_options(settings.model), Path(str(settings.model.model))
    assert options is not None
    weights = None if settings.model.from_scratch else folder
    adapted = AdaptedModel(options, str(folder), folder, weights, "nf4")
    export_merged(checkpoint, adapted, target, ExportForm(dtype="fp32"), lambda done, total: None)


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_checkpoint_is_restored_and_exported_with_the_unpacked_numbers(
    config: Config, tmp_path: Path, from_scratch: bool
) -> None:
    """Packed weights are read from the model's files again; those of a run from random weights are saved."""
    from transformers import AutoModelForCausalLM

    settings = config.but(from_scratch=from_scratch)
    model = trained(settings)
    checkpoint = saved(model, tmp_path / "run")
    names = load(checkpoint).tensors["model"]
    assert ("model.layers.0.mlp.experts.hosted.bank.3.up" in names) == from_scratch
    again = FilledLanguageModel(settings).build_model()
    restore_model(load(checkpoint), again)
    merge(checkpoint, settings, tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert torch.equal(again.eval()(input_ids=ids).logits, expected)
        torch.testing.assert_close(exported.eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
