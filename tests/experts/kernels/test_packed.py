"""Packed matrices against an oracle in plain Python."""

from __future__ import annotations

import pytest
import torch

from experts.kernels.packed import PackedForm, dynamic_values, nf4_values
from experts.types import Packing
from harness.moe.packed_oracle import PUBLISHED_NF4, dynamic_table, quantised

PACKINGS: list[Packing] = ["nf4", "int8"]


def normal(*shape: int, std: float = 0.02, seed: int = 0) -> torch.Tensor:
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def test_the_tables_are_those_of_bitsandbytes() -> None:
    assert nf4_values() == pytest.approx(PUBLISHED_NF4, abs=2e-7)
    assert dynamic_values(signed=True) == pytest.approx(dynamic_table(), rel=1e-12)
    assert len(dynamic_values(signed=False)) == 256


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (8, 64), (37, 29), (180, 100)])
def test_numbers_are_those_of_the_oracle(packing: Packing, size: tuple[int, int]) -> None:
    """The last size has more than 256 blocks, and none divides a matrix but the third."""
    matrix = normal(*size)
    form = PackedForm(packing, *size)
    packed = form.pack(matrix)
    assert packed.dtype == torch.uint8
    assert packed.shape == (form.num_bytes,)
    expected = torch.tensor(quantised(matrix.flatten().tolist(), packing)).view(size)
    torch.testing.assert_close(form.unpack(packed, torch.float32), expected, rtol=1e-5, atol=1e-7)


def test_the_high_half_of_a_byte_comes_first() -> None:
    """Codes are the last bytes of a matrix that fills them: 1 has code 15, 0 code 7, and -1 code 0."""
    matrix = torch.zeros(1, 64)
    matrix[0, 0], matrix[0, 3] = 1.0, -1.0
    form = PackedForm("nf4", 1, 64)
    # Two fp32 numbers, one scale, and 32 bytes of codes fill 48 bytes with 7 of no meaning.
    assert form.pack(matrix)[9:12].tolist() == [0xF7, 0x70, 0x77]


@pytest.mark.parametrize(("packing", "error", "bits"), [("nf4", 0.0955, 4.13), ("int8", 0.0075, 8.13)])
def test_normal_numbers_lose_little(packing: Packing, error: float, bits: float) -> None:
    matrix = normal(512, 768)
    form = PackedForm(packing, 512, 768)
    lost = (form.unpack(form.pack(matrix), torch.float32) - matrix).norm() / matrix.norm()
    assert 0.5 * error < lost < error
    assert 8 * form.num_bytes / matrix.numel() == pytest.approx(bits, abs=0.005)


@pytest.mark.parametrize("packing", PACKINGS)
def test_zeros_stay_zeros(packing: Packing) -> None:
    form = PackedForm(packing, 4, 96)
    assert not form.unpack(form.pack(torch.zeros(4, 96)), torch.float32).any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_parts_have_scales_of_their_own(packing: Packing) -> None:
    """Two matrices packed as one are to the bit what each is by itself, whatever the other's size is."""
    first, second = normal(9, 50), normal(9, 50, std=3.0, seed=1)
    both = PackedForm(packing, 18, 50, parts=2)
    alone = PackedForm(packing, 9, 50)
    packed = both.pack(torch.cat([first, second]))
    assert torch.equal(packed, torch.cat([alone.pack(first), alone.pack(second)]))
    whole = both.unpack(packed, torch.float64)
    parts = [alone.unpack(alone.pack(each), torch.float64) for each in (first, second)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_again_keeps_the_codes(packing: Packing) -> None:
    form = PackedForm(packing, 64, 256)
    once = form.unpack(form.pack(normal(64, 256)), torch.float32)
    twice = form.unpack(form.pack(once), torch.float32)
    assert (twice - once).norm() / once.norm() < 1e-3


def test_a_matrix_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3\); \(3, 4\) was needed"):
        PackedForm("nf4", 3, 4).pack(torch.zeros(4, 3))


def test_a_matrix_without_memory_has_bytes_without_memory() -> None:
    form = PackedForm("nf4", 3, 4)
    packed = form.pack(torch.zeros(3, 4, device="meta"))
    assert packed.is_meta
    assert packed.shape == (form.num_bytes,)
