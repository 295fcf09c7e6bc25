"""Writes the adapters (LoRA) of a checkpoint: as a folder of PEFT, or added to the weights of their model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from experts.kernels.packed import PackedForm
from experts.transformers.files.model_weights import ModelWeights
from experts.transformers.files.original import WritingPlan
from experts.transformers.files.shards import fingerprint, open_shards
from experts.transformers.files.writing import TensorSource
from experts.transformers.layout import is_experts_module
from experts.transformers.lora.adapters import LoraOptions
from experts.transformers.lora.merged import FrozenWeights, MergedWeights, UnpackedWeights
from experts.transformers.lora.packing import pack_frozen, packed_forms
from experts.transformers.lora.peft_files import adapter_config, write_adapters
from experts.transformers.registration import use
from experts.types import Packing
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
    packing: Packing | None = None
    """The form of its frozen weights in training, if they had 4 or 8 bits."""


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

    Weights and adapters are read and added tensor by tensor. Adapters that were trained beside packed weights
    are added to the numbers that those stand for."""
    writer = ModelWriter(model.folder, form)
    try:
        with (
            CheckpointWeights(checkpoint, form.averaged) as weights,
            _base_weights(checkpoint, model, weights) as base,
        ):
            forms = {} if model.packing is None else _packed_forms(model, model.packing)
            # Matrices that are packed in the files are read as the numbers that they stand for.
            in_files = base.packed if isinstance(base, ModelWeights) and model.packing == "nf4" else ()
            of_base = {name: form for name, form in forms.items() if name not in in_files}
            # A run from random weights has its packed ones in the checkpoint.
            sources = UnpackedWeights(base, of_base), UnpackedWeights(weights, forms)
            merged = MergedWeights(*sources, model.options.scale)
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
    base = _model_with_our_experts(model.folder)
    with open_shards(model.weights_folder) as shards:
        yield ModelWeights(base, shards)


def _packed_forms(model: AdaptedModel, packing: Packing) -> dict[str, PackedForm]:
    return packed_forms(pack_frozen(_model_with_our_experts(model.folder), packing))


def _model_with_our_experts(folder: Path) -> Any:
    """Return the model of a folder without memory."""
    model = model_without_memory(folder)
    return use(model) if any(is_experts_module(module) for module in model.modules()) else model


def _check_all_written(plan: WritingPlan, merged: MergedWeights) -> None:
    """Raise ``ValueError`` if weights with adapters are not written, as an output tied to its embedding."""
    lost = sorted(merged.adapted.intersection(plan.unused))
    if lost:
        raise ValueError(
            f"{lost[0]} has an adapter and is tied to another tensor of the model, which has none; export "
            "without --merge"
        )
