"""Causal language models of ``transformers``: continued pre-training and fine-tuning.

Shapes: B samples of a batch, S tokens of a sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from orchestrator.config.sections.model import ModelSettings
from orchestrator.config.settings import Config
from orchestrator.data.documents.opening import open_divided, open_documents, open_mixture
from orchestrator.data.documents.options import DocumentOptions
from orchestrator.errors import UserError
from orchestrator.tasks.generation import Prompt
from orchestrator.tasks.lm.balance import StepBalance, balance_by_bias, counting, has_balance_loss
from orchestrator.tasks.lm.building import (
    add_adapters,
    build_causal_lm,
    has_recurrence,
    leave_to_files,
    lora_options,
)
from orchestrator.tasks.lm.example_tokens import EXAMPLE_SAMPLES, ExampleTokens
from orchestrator.tasks.lm.model_folder import (
    check_installed,
    chosen_template,
    has_checkpoint,
    keep_small_files,
    kept_folder,
    load_config,
    load_tokenizer,
    model_folder,
)
from orchestrator.tasks.lm.output_layer import call_with_labels
from orchestrator.tasks.lm.prompts import cut_prompt, first_prompts, prompt_of
from orchestrator.tasks.metrics import Perplexity
from orchestrator.tasks.task import Loss, StepPreview, Task
from orchestrator.tasks.token_loss import NO_LABEL

if TYPE_CHECKING:
    from orchestrator.data.documents.mixture import MixedDocuments
    from orchestrator.data.documents.packed import PackedDocuments

    Documents = PackedDocuments | MixedDocuments | ExampleTokens

_SEQUENCE_LENGTH = 2048
_HELD_OUT = 1 / 20
_SECONDS_BETWEEN_NOTES = 5.0


class LanguageModel(Task):
    """A model of ``transformers`` that learns to predict the next token of documents or answers."""

    unit = "tokens"

    def __init__(self, config: Config, earlier: Path | None = None) -> None:
        check_installed()
        if config.model.model is None:
            raise UserError(
                "the task lm needs --model: the folder of a transformers model, or its id on the hub"
            )
        self.config = config
        self._earlier = earlier
        # The model of a resumed run may have moved or changed: its config and tokenizer are the run's own.
        # Weights are read, and of a hub downloaded, after the plan: it may say that the model does not fit.
        self.folder = kept_folder(earlier) or model_folder(config.model.model, with_weights=False)
        self.model_config = load_config(self.folder)
        self.positions = _positions(self.model_config)
        self.units_per_sample = _sequence_length(config.model.sequence_length, self.model_config)
        self.metrics = {"perplexity": Perplexity()}
        self._lora = lora_options(config.model)
        self._balance = StepBalance.of(config.moe.balance_loss, self.model_config)
        self.settings_read = self._settings_taken(has_router_biases=False)

    def _settings_taken(self, has_router_biases: bool) -> frozenset[str]:
        """Return the settings that this model can take."""
        names = {f.name for f in fields(ModelSettings)} - {"width", "layers", "vocabulary"}
        names |= {"data", "data_weights", "validation_data", "validation_share", "chat_template"}
        names |= {"packing", "train_on", "text_column"}
        if has_balance_loss(self.model_config):
            names.add("balance_loss")
        if has_router_biases and self._lora is None:
            names.add("balance_bias")
        return frozenset(names)

    # --- the model

    def build_model(self) -> nn.Module:
        from experts.transformers.balance import has_router_biases

        frozen = self.config.model.frozen_weights
        model = build_causal_lm(self.model_config, None if frozen == "auto" else frozen)
        self.settings_read = self._settings_taken(has_router_biases(model))
        balance_by_bias(model, self.config)
        if self._lora is not None:
            add_adapters(model, self._lora)
        if self._leaves_weights_to_files:
            leave_to_files(model, None)
        return model

    def keep_files(self, run_dir: Path) -> None:
        """Copy the config and the tokenizer of the model into the run folder."""
        template = self.config.data.chat_template
        keep_small_files(self.folder, run_dir, None if template is None else self.tokenizer.chat_template)

    def _model_folder(self) -> Path:
        return model_folder(str(self.config.model.model), with_weights=not self.config.model.from_scratch)

    def initialise(self, model: nn.Module) -> None:
        """Read the weights that this host holds, or draw them."""
        from experts.transformers.files.initial import initialise_weights
        from experts.transformers.lora.adapters import initialise_lora, without_adapters

        if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            return  # a model that is traced has no memory
        try:
            with without_adapters(model):
                if self.config.model.from_scratch:
                    initialise_weights(model, self.config.run.seed)
                else:
                    self._read_weights(model)
        except ValueError as error:
            raise UserError(str(error)) from None
        initialise_lora(model, self.config.run.seed)

    def _read_weights(self, model: nn.Module) -> None:
        """Read the weights of the model's files. A run that has checkpoints resumes without them."""
        from experts.transformers.files.initial import await_weights
        from experts.transformers.files.reading import read_weights

        try:
            folder = self._model_folder()
            read_weights(model, folder, _ReadingNotes(folder))
            if self._leaves_weights_to_files:
                leave_to_files(model, folder)
        except (ValueError, UserError) as error:
            if not has_checkpoint(self._earlier):
                raise
            if self._leaves_weights_to_files:
                raise UserError(
                    f"{error}. Checkpoints of adapters (--lora) hold no weights of their model: give the "
                    "folder with the files of the model that the run began with, as --model FOLDER"
                ) from None
            _note(f"the weights are those of the checkpoint alone: {error}")
            await_weights(model)

    @property
    def _leaves_weights_to_files(self) -> bool:
        return self._lora is not None and not self.config.model.from_scratch

    # --- the data

    def train_data(self) -> Documents:
        return self._documents[0]

    def validation_data(self) -> Documents | None:
        return self._documents[1]

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self.folder)
        template = self.config.data.chat_template
        if template is not None:
            tokenizer.chat_template = chosen_template(template, kept_folder(self._earlier))
        return tokenizer

    @cached_property
    def _documents(self) -> tuple[Documents, Documents | None]:
        data = self.config.data
        if not data.data:
            # A plan needs none; a training without data is refused before the task is loaded.
            _note(f"no --data: planned for {EXAMPLE_SAMPLES:,} samples of random tokens")
            vocabulary = self.model_config.get_text_config().vocab_size
            example = ExampleTokens(self.units_per_sample, vocabulary)
            return example, example
        options = self._document_options()
        share = _HELD_OUT if data.validation_share is None else data.validation_share
        if data.validation_data:
            share = 0.0
        held_out: Documents | None = None
        if data.data_weights:
            weights = dict(zip(data.data, data.data_weights, strict=True))
            documents, held_out = open_mixture(weights, self.tokenizer, options, _note, share)
        elif share:
            documents, held_out = open_divided(data.data, self.tokenizer, options, _note, share)
        else:
            documents = open_documents(data.data, self.tokenizer, options, _note)
        if not data.validation_data:
            return documents, held_out
        return documents, open_documents(data.validation_data, self.tokenizer, options, _validation_note)

    def _document_options(self) -> DocumentOptions:
        data = self.config.data
        packing = data.packing and not has_recurrence(self.model_config)
        if data.packing and not packing:
            _note(
                "the model has layers that carry a state from token to token, past the attention: packed "
                "documents would mix, so each is padded to its own sequence (--no-packing)"
            )
        return DocumentOptions(
            sequence_length=self.units_per_sample,
            packing=packing,
            train_on=data.train_on,
            text_column=data.text_column,
            skip_bad=data.skip_bad,
            seed=self.config.run.seed,
            vocabulary=self.model_config.get_text_config().vocab_size,
        )

    # --- the loss

    def prepare_step(self, preview: StepPreview) -> None:
        """Count the labels and the choices of experts in a step, for its auxiliary loss."""
        if self._balance is not None:
            self._balance.prepare(preview, self._router_outputs)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        labels_BS = batch["labels"]
        outputs = self._call(model, batch, labels_BS)
        cross_entropy = outputs.loss
        if cross_entropy is None:
            cross_entropy = _cross_entropy(outputs.logits, labels_BS)
        count = (labels_BS != NO_LABEL).sum()
        loads = _expert_loads(model)
        if not model.training:
            return Loss(cross_entropy, count, {"perplexity": (cross_entropy, count)}, loads)
        if self._balance is None:
            return Loss(cross_entropy, count, {}, loads)
        balance = self._balance.loss(model, outputs.router_logits, batch["mask"]).to(cross_entropy)
        metrics = {"cross_entropy": cross_entropy.detach(), "balance_loss": balance.detach()}
        return Loss(cross_entropy + balance, count, metrics, loads)

    # --- generation

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end an answer or a document."""
        of_config = self.model_config.get_text_config().eos_token_id
        of_config = of_config if isinstance(of_config, list | tuple) else (of_config,)
        return frozenset(token for token in (self.tokenizer.eos_token_id, *of_config) if token is not None)

    def prompts(self, texts: Sequence[str], data: Any, max_new_tokens: int) -> list[Prompt]:
        """Return the prompts of texts; without texts the first ones of the data."""
        if texts:
            prompts = [prompt_of(text, self.tokenizer, data.is_chat) for text in texts]
        else:
            prompts = first_prompts(data, self.tokenizer)
        positions = _positions(self.model_config)
        if positions is not None:
            if max_new_tokens >= positions:
                raise UserError(
                    f"--max-new-tokens is {max_new_tokens}, but the model has positions for {positions} "
                    "tokens, prompts included; lower it"
                )
            prompts = [cut_prompt(prompt, positions - max_new_tokens) for prompt in prompts]
        return [prompt for prompt in prompts if prompt.tokens]

    def logits(self, model: nn.Module, input_ids_BS: Tensor) -> Tensor:
        """Return the scores of the next token at each position. Padding may follow a prompt."""
        positions_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device).expand_as(input_ids_BS)
        return model(input_ids=input_ids_BS, position_ids=positions_BS, use_cache=False).logits

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    def _router_outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        no_labels_BS = torch.full_like(batch["labels"], NO_LABEL)
        return self._call(model, batch, no_labels_BS).router_logits, batch["mask"]

    def _call(self, model: nn.Module, batch: dict[str, Tensor], labels_BS: Tensor) -> Any:
        """Return the model's outputs, with the sum of the loss, or with logits where they are not large."""
        # No attention mask: from positions that begin anew, transformers keeps documents apart itself.
        inputs: dict[str, Any] = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "use_cache": False,
        }
        if self._balance is not None and model.training:
            inputs["output_router_logits"] = True
        with counting(model, batch["mask"]):
            return call_with_labels(model, labels_BS, inputs, _note)


def _expert_loads(model: nn.Module) -> tuple[Tensor, ...]:
    from experts.transformers.registration import expert_loads

    return expert_loads(model)


def _cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the sum over the labels, in fp32 at least."""
    logits = logits_BSV.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels_BS.flatten(), ignore_index=NO_LABEL, reduction="sum")


def _positions(model_config: Any) -> int | None:
    """Return the number of tokens that the model has positions for; None if it has no limit."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None) or None


def _sequence_length(given: int | None, model_config: Any) -> int:
    largest = _positions(model_config)
    if given is None:
        return min(_SEQUENCE_LENGTH, largest or _SEQUENCE_LENGTH)
    if given < 2:
        raise UserError(f"--sequence-length is {given}; a document needs at least 2 tokens")
    if largest and given > largest:
        raise UserError(
            f"--sequence-length is {given}, but the model has positions for {largest} tokens; lower it"
        )
    return given


def _validation_note(message: str) -> None:
    _note(f"validation {message}")


def _note(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


class _ReadingNotes:
    """Tells the progress of reading weights, every few seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_s = monotonic()

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        if monotonic() - self._last_s < _SECONDS_BETWEEN_NOTES:
            return
        self._last_s = monotonic()
        _note(f"reading weights of {self._folder.name}: {done_bytes / 1e9:.1f} of {all_bytes / 1e9:.1f} GB")
