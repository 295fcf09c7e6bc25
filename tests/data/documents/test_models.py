"""A batch of packed documents has the loss of the documents one by one, in models of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.lm.families import COMMON, Fp32MeansFp64, build
from harness.lm.packed_samples import Segment, open_rows, segments_of
from harness.lm.tokenizers import chat_tokenizer
from orchestrator.data.documents.packed import NO_LABEL, PackedDocuments

VOCABULARY = 31
"""Of the tiny models; tokens are mapped into it."""


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**COMMON)).double()


def loss_sum(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of the losses, with the arguments that training gives to the model."""
    with Fp32MeansFp64():
        logits = model(
            input_ids=batch["input_ids"] % VOCABULARY, position_ids=batch["position_ids"], use_cache=False
        ).logits
    labels = batch["labels"]
    labels = torch.where(labels == NO_LABEL, labels, labels % VOCABULARY)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")


def alone(segment: Segment) -> dict[str, Tensor]:
    """Return a segment as a batch of its own, without padding."""
    return {
        "input_ids": torch.tensor([segment.tokens]),
        "labels": torch.tensor([segment.labels]),
        "position_ids": torch.arange(len(segment.tokens))[None],
    }


def chats() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": "a" * n},
                {"role": "assistant", "content": "b" * (n % 3 + 1)},
            ]
        }
        for n in range(1, 8)
    ]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "rows", [chats(), [{"text": "one two " * n} for n in range(1, 9)]], ids=["chat", "text"]
)
@pytest.mark.parametrize("build_model", [llama, lambda: build("Qwen3-MoE")], ids=["llama", "qwen3-moe"])
def test_a_packed_batch_has_the_sum_of_the_losses_of_its_documents(
    tmp_path: Path, build_model: Any, rows: list[Any], packing: bool
) -> None:
    samples: PackedDocuments = open_rows(
        tmp_path / "a.jsonl", rows, chat_tokenizer(), sequence_length=96, packing=packing
    )
    model = build_model()
    together = loss_sum(model, samples.gather(torch.arange(len(samples))))
    segments = [segment for sample in segments_of(samples) for segment in sample]
    assert packing == (len(segments) > len(samples))
    one_by_one = sum(loss_sum(model, alone(segment)) for segment in segments)
    torch.testing.assert_close(together, torch.as_tensor(one_by_one), rtol=1e-10, atol=1e-10)
