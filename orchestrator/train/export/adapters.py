"""Writes the adapters (LoRA) of a checkpoint: as a folder of PEFT, or added to the weights of their model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from torch import Tensor

from experts.transformers.files.fingerprint import fingerprint
from experts.transformers.files.model_weights import ModelWeights
from experts.transformers.files.original import WritingPlan
from experts.transformers.files.shards import open_shards
from experts.transformers.files.writing import TensorSource
from experts.transformers.layout import is_experts_module
from experts.transformers.lora.adapters import LoraOptions
from experts.transformers.lora.merged import FrozenWeights, MergedWeights
from experts.transformers.lora.peft_files import adapter_config, write_adapters
from experts.transformers.registration import use
from orchestrator.checkpoint.files import load
from orchestrator.checkpoint.weight_source import CheckpointWeights
from orchestrator.errors import UserError
from orchestrator.tasks.lm.model_folder import CONFIG, copy_small_files
from orchestrator.train.export.folder import new_folder
from orchestrator.train.export.weights import (
    DTYPES,
    Exported,
    ExportForm,
    ModelWriter,
    OnProgress,
    model_without_memory,
    not_written,
)


@dataclass(frozen=True)
class AdaptedModel:
    """The model of a run with adapters."""

    options: LoraOptions
    name: str
    """The folder or the hub id from which the model is loaded."""
    folder: Path
    """The folder with its config.json and tokenizer."""
    weights_folder: Path | None = None
    """The folder with its safetensors files; None where they are not needed."""


def export_adapters(checkpoint: Path, model: AdaptedModel, target: Path, form: ExportForm) -> Exported:
    """Write the adapters of a checkpoint into a new folder, as ``PeftModel.from_pretrained`` reads them."""
    began_s = perf_counter()
    if _frozen_base(checkpoint) is None:
        raise UserError(
            f"the run of {checkpoint} began with random weights, which no other folder has: its adapters are "
            "of no use without them; give --merge"
        )
    config = adapter_config(model_without_memory(model.folder), model.options, model.name)
    with CheckpointWeights(checkpoint, form.averaged) as weights, new_folder(target) as partial:

        def read(name: str) -> Tensor:
            tensor = weights.read(name)
            return tensor.to(DTYPES[form.dtype]) if form.dtype else tensor

        num_bytes = write_adapters(partial, weights.stored, read, config)
        # With the model's config the folder would look like that of a whole model.
        copy_small_files(model.folder, partial, without=(CONFIG,))
    return Exported(target, num_bytes, perf_counter() - began_s)


def export_merged(
    checkpoint: Path, model: AdaptedModel, target: Path, form: ExportForm, on_progress: OnProgress
) -> Exported:
    """Write a model with the adapters of a checkpoint added to its weights, as ``from_pretrained`` loads it.

    Weights and adapters are read and added tensor by tensor."""
    writer = ModelWriter(model.folder, form)
    try:
        with (
            CheckpointWeights(checkpoint, form.averaged) as weights,
            _base_weights(checkpoint, model, weights) as base,
        ):
            merged = MergedWeights(base, weights, model.options.scale)
            plan = writer.plan(merged)
            _check_all_written(plan, merged)
            return writer.write(plan, merged, target, on_progress)
    except ValueError as error:
        raise not_written(checkpoint, model.folder, error) from None


def _frozen_base(checkpoint: Path) -> str | None:
    """Return the fingerprint of the files with the frozen weights; None if the checkpoint holds them."""
    return load(checkpoint, kinds=frozenset()).state.get("frozen_base")


@contextmanager
def _base_weights(
    checkpoint: Path, model: AdaptedModel, weights: CheckpointWeights
) -> Iterator[TensorSource]:
    """Yield the weights that were frozen: those of the model's files, or of a run from random weights."""
    saved = _frozen_base(checkpoint)
    if saved is None or model.weights_folder is None:
        yield FrozenWeights(weights)
        return
    if fingerprint(model.weights_folder) != saved:
        raise UserError(
            f"{model.weights_folder} holds other weights than those that the adapters of {checkpoint} were "
            "trained with; give the folder of that model: --model FOLDER"
        )
    base = model_without_memory(model.folder)
    if any(is_experts_module(module) for module in base.modules()):
        use(base)
    with open_shards(model.weights_folder) as shards:
        yield ModelWeights(base, shards)


def _check_all_written(plan: WritingPlan, merged: MergedWeights) -> None:
    """Raise ``ValueError`` if weights with adapters are not written, as an output tied to its embedding."""
    lost = sorted(merged.adapted.intersection(plan.unused))
    if lost:
        raise ValueError(
            f"{lost[0]} has an adapter and is tied to another tensor of the model, which has none; export "
            "without --merge"
        )
