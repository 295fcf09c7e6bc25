"""Tests of token files: windows that are read from the file, in workers too."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.errors import UserError
from orchestrator.tasks.task import Gatherable, WindowData
from orchestrator.tasks.token_file import TokenFile


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_windows_are_those_of_the_tokens_in_memory(tmp_path: Path, dtype: str, suffix: str) -> None:
    tokens = np.arange(60_000, 60_050).astype(dtype)
    file = tmp_path / f"tokens{suffix}"
    if suffix == ".npy":
        np.save(file, tokens)
    else:
        tokens.tofile(file)
    data = TokenFile(file, context=7, dtype=dtype)
    expected = WindowData(torch.from_numpy(tokens.astype(np.int64)), 7)
    index_B = torch.tensor([6, 0, 3])
    assert isinstance(data, Gatherable)
    assert len(data) == len(expected) == 7
    assert torch.equal(data.gather(index_B), expected.gather(index_B))
    in_memory = data.to(torch.device("meta"))
    assert isinstance(in_memory, WindowData)
    assert len(in_memory) == 7
    content = pickle.dumps(data)
    assert len(content) < 1000
    copy = pickle.loads(content)  # noqa: S301
    assert torch.equal(copy.gather(index_B), expected.gather(index_B))


def test_files_that_hold_no_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the tokens of .*none.bin"):
        TokenFile(tmp_path / "none.bin", 4)
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "short.bin")
    with pytest.raises(UserError, match=r"short.bin has 4 tokens; a window needs 4 \+ 1"):
        TokenFile(tmp_path / "short.bin", 4)
    np.save(tmp_path / "floats.npy", np.zeros((2, 3)))
    with pytest.raises(UserError, match=r"float64 of shape \(2, 3\); one row of whole numbers"):
        TokenFile(tmp_path / "floats.npy", 4)
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"odd.bin as uint16"):
        TokenFile(tmp_path / "odd.bin", 1)
    with pytest.raises(UserError, match=r"dtype is 'float32'"):
        TokenFile(tmp_path / "odd.bin", 1, dtype="float32")
