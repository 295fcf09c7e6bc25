"""A language model, fine-tuned and exported: a tiny one that is made here, without a download.

pip install 'expert-orchestrator[hf]' -c constraints.txt
python examples/fine_tune.py            # in a temporary folder
python examples/fine_tune.py tiny       # in the folder tiny, which stays
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from orchestrator import Trainer
from orchestrator.cli.main import main as orchestrator

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_model(folder: Path) -> None:
    """Write a mixture of experts with random weights, and a tokenizer of bytes."""
    special = ["<end>", "<user>", "<assistant>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokens.add_special_tokens(special)
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def save_chats(file: Path) -> None:
    """Write a conversation a line."""
    lines = []
    for number in range(200):
        messages = [
            {"role": "user", "content": f"{number % 10} + {number // 10 % 10}"},
            {"role": "assistant", "content": str(number % 10 + number // 10 % 10)},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    if len(sys.argv) > 1:
        fine_tune(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        fine_tune(Path(folder))


def fine_tune(here: Path) -> None:
    """Train a new model in a folder, and export it there."""
    save_model(here / "model")
    save_chats(here / "chats.jsonl")
    trainer = Trainer.for_model(
        str(here / "model"),
        data=str(here / "chats.jsonl"),
        sequence_length=128,
        learning_rate=1e-2,
        global_batch_size=4,
        max_steps=20,
        epochs=10,
        evaluate_every=20,
        checkpoint_every=20,
        run_dir=here / "run",
    )
    losses = trainer.fit().history["loss"]
    print(f"loss {losses.iloc[0]:.3f} at the first step, {losses.iloc[-1]:.3f} at the last")
    assert orchestrator(["export", str(here / "run"), str(here / "tuned")]) == 0
    tuned = AutoModelForCausalLM.from_pretrained(here / "tuned", trust_remote_code=False)
    print(f"exported: {type(tuned).__name__} with {tuned.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
