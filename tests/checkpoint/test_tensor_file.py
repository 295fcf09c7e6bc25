"""Safetensors files in hashed pieces: readable by the library, and in part by us."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from orchestrator.checkpoint import tensor_file
from orchestrator.checkpoint.hashed_file import HashedReader
from orchestrator.checkpoint.tensor_file import check_dtype, read_tensors, write_tensors
from orchestrator.errors import CheckpointDamaged, UserError

EXPERTS = frozenset({"exp_avg/bank.3.up", "bank.1.up", "bank.1.down", "bank.flags"})
MIXED: dict[str, Tensor] = {
    "dense": torch.randn(7, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "half": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "bank.flags": torch.tensor([False]),
    "bank.1.up": torch.randn(31, 3).half(),
    "bank.1.down": torch.randn(6, 5).t(),
    "exp_avg/bank.3.up": torch.randint(-9, 9, (101,)),
    "counter": torch.tensor(4.0).expand(3)[1],
    "bytes": torch.arange(9, dtype=torch.uint8),
}


@pytest.fixture(params=[5, 64, 2**23], ids="pieces of {} bytes".format)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", request.param)
    return request.param


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The place and the size of each read from the disk."""
    seen: list[tuple[int, int]] = []
    real = HashedReader._read_unverified

    def read(self: HashedReader, begin: int, num_bytes: int) -> memoryview:
        seen.append((begin, num_bytes))
        return real(self, begin, num_bytes)

    monkeypatch.setattr(HashedReader, "_read_unverified", read)
    return seen


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name], tensor), name


def test_tensors_are_read_again_by_us_and_by_the_library(tmp_path: Path, small_pieces: int) -> None:
    hashes = write_tensors(tmp_path / "file", MIXED, EXPERTS)
    assert (tmp_path / "file").stat().st_size == hashes.num_bytes
    assert max(num_bytes for num_bytes, _ in hashes.pieces[1:]) <= small_pieces
    assert_equal(read_tensors(tmp_path / "file", hashes, lambda _: True), MIXED)
    assert_equal(load_file(tmp_path / "file"), MIXED)


def test_a_file_without_tensors_is_read_again(tmp_path: Path) -> None:
    hashes = write_tensors(tmp_path / "file", {}, frozenset())
    assert read_tensors(tmp_path / "file", hashes, lambda _: True) == {}
    assert load_file(tmp_path / "file") == {}


def test_only_the_pieces_of_needed_tensors_are_read(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """Experts share no piece with other tensors."""
    hashes = write_tensors(tmp_path / "file", MIXED, EXPERTS)
    needed = {name: tensor for name, tensor in MIXED.items() if name not in EXPERTS}
    assert_equal(read_tensors(tmp_path / "file", hashes, needed.__contains__), needed)
    header_bytes = hashes.pieces[0][0]
    assert sum(size for _, size in reads) == header_bytes + sum(tensor.nbytes for tensor in needed.values())
    assert len(set(reads)) == len(reads), "no piece is read twice"


def test_a_flipped_bit_is_found_only_by_those_who_read_it(tmp_path: Path) -> None:
    hashes = write_tensors(tmp_path / "file", MIXED, EXPERTS)
    intact = (tmp_path / "file").read_bytes()
    dense = {name for name in MIXED if name not in EXPERTS}
    found = {"dense": 0, "experts": 0, "all": 0}
    for position in range(len(intact)):
        data = bytearray(intact)
        data[position] ^= 4
        (tmp_path / "file").write_bytes(bytes(data))
        for reader, names in (("dense", dense), ("experts", EXPERTS), ("all", MIXED)):
            try:
                read_tensors(tmp_path / "file", hashes, names.__contains__)
            except CheckpointDamaged:
                found[reader] += 1
    header_bytes = hashes.pieces[0][0]
    num_expert_bytes = sum(MIXED[name].nbytes for name in EXPERTS)
    assert found["all"] == len(intact)
    assert found["experts"] == header_bytes + num_expert_bytes
    assert found["dense"] == len(intact) - num_expert_bytes


def test_a_type_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"w is torch\.complex128"):
        check_dtype("w", torch.zeros(2, dtype=torch.complex128))
