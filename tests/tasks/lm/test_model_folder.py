"""Tests of the folder of a model: what lacks in it is said before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from orchestrator.errors import UserError
from orchestrator.tasks.lm.model_folder import load_tokenizer
from tests.support.lm.tokenizers import save_tokenizer


@pytest.mark.parametrize("family", [transformers.GPT2Config, transformers.Qwen3Config])
def test_the_empty_tokenizer_of_a_folder_without_one_is_refused(tmp_path: Path, family: type) -> None:
    """Of these families, transformers makes one from the config alone."""
    family(bos_token_id=None, eos_token_id=None).save_pretrained(tmp_path)
    needed = r"has no tokenizer that can be read: its vocabulary is empty; .*needs its tokenizer\.json"
    with pytest.raises(UserError, match=needed):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_a_vocabulary_is_read(tmp_path: Path) -> None:
    transformers.GPT2Config().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path)("a sum")["input_ids"]
