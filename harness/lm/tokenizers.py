"""Tokenizers that are trained here, without a download: byte-level BPE with a ChatML template."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

EOS = "<|endoftext|>"
BOS = "<|startoftext|>"
TURN_BEGIN = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (EOS, BOS, TURN_BEGIN, TURN_END)
BYTES = 256

CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template with ``generation`` tags around the answers and their stop tokens."""
PLAIN_CHATML = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same text without the tags."""

_TRAINED_ON = (
    "The expert host reads only the experts that it holds. Each token goes to two experts, and the "
    "answers come back. Question: what is the sum of 12 and 30? Answer: it is 42.\n\n"
    "def add(first, second):\n    return first + second\n"
)


def chat_tokenizer(*, template: str | None = PLAIN_CHATML, adds_bos: bool = False, merges: int = 100) -> Any:
    """Return a fast tokenizer of ``transformers``.

    Its ids: the special tokens, the 256 bytes, then ``merges`` learnt ones. ``adds_bos``: every text begins
    with BOS unless special tokens are turned off."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(_trained(merges))
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, bos_token=BOS if adds_bos else None
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(folder: Path, **options: Any) -> Path:
    """Write the files of a tokenizer into a model's folder, as ``AutoTokenizer`` reads them."""
    chat_tokenizer(**options).save_pretrained(folder)
    return folder


@cache
def _trained(merges: int) -> str:
    """Return a trained tokenizer as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL_TOKENS) + BYTES + merges,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([_TRAINED_ON], trainer)
    return backend.to_str()
