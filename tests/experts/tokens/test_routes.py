"""Route tables: every bucket has a host, the shares are kept, and tokens stay local where they can."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.structure import Change, Expert, LayerStructure, changed
from experts.tokens.routes import BUCKETS, route_table, split_in_buckets


def layer_of(*experts: Expert) -> LayerStructure:
    return LayerStructure("moe", experts, len(experts))


@st.composite
def copied_experts(draw: st.DrawFn) -> tuple[Expert, int]:
    num_hosts = draw(st.integers(1, 9))
    hosts = draw(st.sets(st.integers(0, num_hosts - 1), min_size=1))
    split = draw(st.lists(st.integers(0, 500), min_size=len(hosts), max_size=len(hosts)))
    has_split = draw(st.booleans())
    return Expert(0, 8, tuple(sorted(hosts)), split=tuple(split) if has_split else ()), num_hosts


@given(copied_experts())
def test_a_table_names_only_holders_and_keeps_the_shares_of_the_copies(case: tuple[Expert, int]) -> None:
    expert, num_hosts = case
    tables = [route_table(layer_of(expert), rank, num_hosts) for rank in range(num_hosts)]
    counts = Counter(host for table in tables for host in table[0])
    assert {len(table[0]) for table in tables} == {BUCKETS}
    assert set(counts) <= set(expert.hosts)
    quota = split_in_buckets(expert.split or [1] * len(expert.hosts), num_hosts)
    assert [counts[host] for host in expert.hosts] == list(quota)


@given(copied_experts())
def test_a_rank_keeps_all_tokens_that_the_share_of_its_copy_allows(case: tuple[Expert, int]) -> None:
    expert, num_hosts = case
    quota = split_in_buckets(expert.split or [1] * len(expert.hosts), num_hosts)
    for host, buckets in zip(expert.hosts, quota, strict=True):
        kept = route_table(layer_of(expert), host, num_hosts)[0].count(host)
        assert kept == min(BUCKETS, buckets)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9), st.integers(1, 40))
def test_a_split_is_within_one_bucket_of_the_weights(weights: list[int], num_hosts: int) -> None:
    split = split_in_buckets(weights, num_hosts)
    total = sum(weights) or len(weights)
    exact = [weight * BUCKETS * num_hosts / total for weight in (weights if any(weights) else [1] * total)]
    assert sum(split) == BUCKETS * num_hosts
    assert all(abs(count - share) < 1 for count, share in zip(split, exact, strict=True))


def test_an_expert_on_one_host_has_a_constant_row() -> None:
    assert route_table(layer_of(Expert(0, 8, (2,))), 0, 3) == ((2,) * BUCKETS,)


def test_few_tokens_reach_all_copies() -> None:
    # Rank 2 has no copy and sends half of its tokens to each of the two.
    table = route_table(layer_of(Expert(0, 8, (0, 1))), 2, 3)
    assert Counter(table[0][:8]) == {0: 4, 1: 4}


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 3 does not exist; there are 3 hosts"):
        route_table(layer_of(Expert(0, 8)), 3, 3)


def test_copies_and_their_shares_are_sorted_by_host_and_survive_json() -> None:
    change = Change("copied", 0, (1,), "hot", hosts=((2, 0),), splits=((30, 98),))
    assert Change.from_json(json.loads(json.dumps(change.to_json()))) == change
    layer = changed(LayerStructure.initial("moe", [8, 8]), change, 3)
    assert layer.expert(1).hosts == (0, 2)
    assert layer.expert(1).split == (98, 30)
    assert layer.expert(0) == Expert(0, 8)
    assert LayerStructure.from_json(json.loads(json.dumps(layer.to_json()))) == layer


def test_a_move_ends_the_shares_of_copies() -> None:
    copied = Change("copied", 0, (0,), "hot", hosts=((0, 1),), splits=((30, 98),))
    moved = Change("moved", 0, (0,), "cold", hosts=((1,),))
    layer = changed(changed(LayerStructure.initial("moe", [8]), copied, 0), moved, 1)
    assert layer.expert(0) == Expert(0, 8, (1,))


def test_shares_for_another_number_of_copies_are_refused() -> None:
    change = Change("copied", 0, (0,), "hot", hosts=((0, 1),), splits=((1, 2, 3),))
    with pytest.raises(ValueError, match="expert 0 has 2 hosts and shares for 3 copies"):
        changed(LayerStructure.initial("moe", [8]), change, 0)
