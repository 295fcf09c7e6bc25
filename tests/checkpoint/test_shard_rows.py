"""The rows of shards: divided as FSDP2 does, and joined for another number of hosts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from orchestrator.checkpoint.shard_rows import ShardRows, join_rows, shard_rows


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_rows_are_divided_as_torch_chunks_them(shards: int) -> None:
    """FSDP2 cuts with ``torch.chunk``, which leaves out empty chunks at the end."""
    for total in range(1, 20):
        whole = torch.arange(total)
        chunks = [*torch.chunk(whole, shards), *[whole[:0]] * shards][:shards]
        for rank, chunk in enumerate(chunks):
            rows = shard_rows(total, rank, shards)
            assert whole[rows.first : rows.end].tolist() == chunk.tolist(), (total, rank)
            assert rows.are_all == (len(chunk) == total)


@pytest.mark.parametrize(("before", "after"), product([1, 2, 3, 5], [1, 2, 3, 4, 7]))
def test_shards_are_joined_for_any_number_of_hosts(before: int, after: int) -> None:
    """From all former shards, and from those alone that overlap the new ones."""
    for total in (1, 2, 4, 7, 8, 13):
        whole = torch.randn(total, 3)
        pieces = [
            (rows, whole[rows.first : rows.end])
            for rows in (shard_rows(total, rank, before) for rank in range(before))
        ]
        for rank in range(after):
            wanted = shard_rows(total, rank, after)
            expected = whole[wanted.first : wanted.end]
            needed = [(rows, piece) for rows, piece in pieces if rows.overlap(wanted)]
            assert torch.equal(join_rows(pieces[::-1], wanted), expected), (total, rank)
            assert torch.equal(join_rows(needed or pieces[:1], wanted), expected), (total, rank)
            for missing in range(len(needed)):
                with pytest.raises(ValueError, match="are missing"):
                    join_rows([*needed[:missing], *needed[missing + 1 :]], wanted)


def test_rows_of_one_piece_are_not_copied() -> None:
    piece = torch.randn(4, 3)
    joined = join_rows([(ShardRows(4, 8, 10), piece)], ShardRows(5, 7, 10))
    assert joined.data_ptr() == piece[1].data_ptr()


def test_pieces_of_a_tensor_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="a shard is of 12 rows, and the tensor has 10"):
        join_rows([(ShardRows(0, 12, 12), torch.zeros(12))], ShardRows(0, 5, 10))
