"""The hosts of tokens and the rows to them, against a loop over hosts and tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experts.tokens.destinations import Destinations

Hosts = list[list[int]]


@st.composite
def drawn_hosts(draw: st.DrawFn) -> tuple[Hosts, int, int]:
    """Hosts of the choices of some tokens, -1 for dropped ones, the number of choices and of hosts."""
    num_hosts = draw(st.sampled_from([1, 2, 3, 7, 200, 255, 256, 300]))
    top_k = draw(st.integers(1, 5))
    host = st.integers(-1, num_hosts - 1)
    tokens = st.lists(st.lists(host, min_size=top_k, max_size=top_k), max_size=12)
    return draw(tokens), top_k, num_hosts


def rows_oracle(host_TK: Hosts, num_hosts: int) -> list[tuple[int, int]]:
    """Host and token of each row to send, in order."""
    tokens = range(len(host_TK))
    return [(host, token) for host in range(num_hosts) for token in tokens if host in host_TK[token]]


@settings(deadline=None)
@given(drawn_hosts())
def test_a_token_has_a_row_for_each_of_its_hosts(drawn: tuple[Hosts, int, int]) -> None:
    """Rows are sorted by host and then by token, and a token's rows are summed in the order of hosts."""
    hosts, top_k, num_hosts = drawn
    host_TK = torch.tensor(hosts, dtype=torch.int64).view(-1, top_k)
    destinations = Destinations.of(host_TK, num_hosts)
    expected = rows_oracle(hosts, num_hosts)
    counts = [sum(host == n for host, _ in expected) for n in range(num_hosts)]
    assert destinations.rows_N.tolist() == counts
    flat = [host for choices in hosts for host in choices]
    assert destinations.expert_rows_N.tolist() == [flat.count(host) for host in range(num_hosts)]
    row_map = destinations.transfer_plan(tuple(counts), tuple(counts)).row_map
    assert row_map.token_R.tolist() == [token for _, token in expected]
    assert row_map.row_TK.shape == (len(hosts), min(top_k, num_hosts)), "no column per host"
    for token, rows in enumerate(row_map.row_TK.tolist()):
        own_rows = [row for row, (_, sent_token) in enumerate(expected) if sent_token == token]
        assert [row for row in rows if row >= 0] == own_rows


@settings(deadline=None)
@given(drawn_hosts())
def test_a_row_names_the_experts_of_its_host(drawn: tuple[Hosts, int, int]) -> None:
    hosts, top_k, num_hosts = drawn
    host_TK = torch.tensor(hosts, dtype=torch.int64).view(-1, top_k)
    experts_TK: Tensor = torch.arange(host_TK.numel()).view_as(host_TK)
    destinations = Destinations.of(host_TK, num_hosts)
    plan = destinations.transfer_plan(tuple(destinations.rows_N.tolist()), ())
    ids_SK = destinations.expert_ids(experts_TK, plan)
    assert ids_SK.dtype == torch.int32
    expected = [
        [int(expert) if chosen == host else -1 for expert, chosen in zip(experts, hosts[token], strict=True)]
        for host, token in rows_oracle(hosts, num_hosts)
        for experts in [experts_TK[token]]
    ]
    assert ids_SK.tolist() == expected
