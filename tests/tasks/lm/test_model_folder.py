"""Tests of the folder of a model: what lacks in it is said before training, and its code is not executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from harness.lm.tokenizers import save_tokenizer
from orchestrator.errors import UserError
from orchestrator.tasks.lm.building import build_causal_lm
from orchestrator.tasks.lm.model_folder import load_config, load_tokenizer
from orchestrator.train.export.weights import model_without_memory


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


def folder_with_code(folder: Path, model_type: str, auto_class: str) -> Path:
    """Write the folder of a model whose files name a class of a module that writes ``canary``."""
    (folder / "evil.py").write_text(f"open({str(folder / 'canary')!r}, 'w')\nclass Its:\n    pass\n")
    named = {auto_class: ["evil.Its", None] if auto_class == "AutoTokenizer" else "evil.Its"}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": named}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Its", "auto_map": named}))
    return folder


LOADS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "config": ("made_up", "AutoConfig", load_config),
    "config of an export": ("made_up", "AutoConfig", model_without_memory),
    # transformers knows a config of these, and no causal language model.
    "model": ("vit", "AutoModelForCausalLM", lambda folder: build_causal_lm(load_config(folder))),
    "model of an export": ("vit", "AutoModelForCausalLM", model_without_memory),
    "tokenizer": ("made_up", "AutoTokenizer", load_tokenizer),
}


@pytest.mark.parametrize("name", LOADS)
def test_code_in_a_folder_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model_type, auto_class, load = LOADS[name]
    folder = folder_with_code(tmp_path, model_type, auto_class)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    with pytest.raises(UserError) as refused:
        load(folder)
    assert not asked
    assert not (folder / "canary").exists()
    assert "custom code" in str(refused.value)
    assert "nothing from a model's folder is executed" in str(refused.value)


def test_a_known_family_is_loaded_without_the_code_beside_it(tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path, "qwen3", "AutoConfig")
    assert isinstance(load_config(folder), transformers.Qwen3Config)
    assert not (folder / "canary").exists()
