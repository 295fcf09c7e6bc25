"""A key of tokenised data: it changes with the files, the tokenizer and the options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from orchestrator.data.documents.options import DocumentOptions
from orchestrator.data.documents.rows import RowFile

_FORMAT = 2
"""Raise this when the same rows become other tokens, masks or files."""


def fingerprint(files: Sequence[RowFile], tokenizer: Any, options: DocumentOptions) -> str:
    """Return the key. Length, packing and seed are not part of it: samples are laid out at each start."""
    facts = {
        "format": _FORMAT,
        "files": [list(file.version()) for file in files],
        "tokenizer": _tokenizer_facts(tokenizer),
        "options": [options.train_on, options.text_column, options.skip_bad],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Calls of the tokenizer change these two; they are set anew by each call.
        model = {
            key: value
            for key, value in json.loads(backend.to_str()).items()
            if key not in ("truncation", "padding")
        }
    else:
        model = {"vocabulary": tokenizer.get_vocab(), "settings": getattr(tokenizer, "init_kwargs", {})}
    return {
        "model": model,
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
    }
