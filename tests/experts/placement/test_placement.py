"""Placement against enumeration where that is feasible, and against simple rules and the lower
bound where it is not."""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement.placement import (
    CannotPlace,
    ExpertCost,
    HostFacts,
    Placement,
    check_placement,
    place,
    placement_of,
    read_placement,
    round_robin,
)
from harness.moe.placement_oracle import (
    experts_of_work,
    fits,
    hosts_of_speed,
    optimum,
    random_case,
    slowest_time,
)

GIB = 2**30
works = st.one_of(st.integers(0, 9), st.floats(1e-3, 1e15)).map(float)


def contiguous(experts: int, hosts: int) -> list[int]:
    return [expert * hosts // experts for expert in range(experts)]


def equal_counts(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts]) -> list[int]:
    """Heaviest first to the least loaded host that does not yet hold its share."""
    share = -(-len(experts) // len(hosts))
    load = [0.0] * len(hosts)
    num_held = [0] * len(hosts)
    host_of = [0] * len(experts)
    for expert in sorted(range(len(experts)), key=lambda e: -experts[e].work):
        open_hosts = [host for host in range(len(hosts)) if num_held[host] < share]
        host = min(open_hosts, key=lambda host: load[host])
        host_of[expert] = host
        num_held[host] += 1
        load[host] += experts[expert].work
    return host_of


# --- optimal placements


@pytest.mark.parametrize("block", range(4))
def test_small_cases_equal_enumeration(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        experts, hosts = random_case(seed, (6, 3), (7, 2), (5, 4))
        result = place(experts, hosts)
        assert result.slowest == pytest.approx(optimum(experts, hosts), rel=1e-8)
        assert result.bound <= result.slowest * (1 + 1e-12)
        assert (result.method == "exact") == (result.gap < 1e-9)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.builds(ExpertCost, works, st.integers(0, 6)), max_size=6),
    st.lists(
        st.builds(HostFacts, st.sampled_from([1, 2, 4, 4.5]), st.sampled_from([0, 2, 5, 6, 7, 9, math.inf])),
        min_size=1,
        max_size=3,
    ),
)
def test_memory_limits_hold_and_nothing_that_fits_is_refused(
    experts: list[ExpertCost], hosts: list[HostFacts]
) -> None:
    best = optimum(experts, hosts)
    if best == math.inf:
        with pytest.raises(CannotPlace):
            place(experts, hosts)
        return
    result = place(experts, hosts)
    assert fits(result.host_of, experts, hosts)
    assert result.slowest == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_never_worse_than_the_simple_rules(seed: int) -> None:
    experts, hosts = random_case(seed, (8, 3), (30, 4), (60, 7), (250, 7))
    ours = place(experts, hosts).slowest * (1 - 1e-9)
    assert ours <= round_robin(experts, hosts).slowest
    assert ours <= slowest_time(contiguous(len(experts), len(hosts)), experts, hosts)
    assert ours <= slowest_time(equal_counts(experts, hosts), experts, hosts)


@pytest.mark.parametrize(("num_experts", "num_hosts"), [(64, 7), (256, 8), (256, 64)])
def test_many_experts_come_near_the_lower_bound(num_experts: int, num_hosts: int) -> None:
    draw = random.Random(7)
    experts = experts_of_work(*(draw.uniform(0.5, 1.5) for _ in range(num_experts)))
    speeds = [draw.choice([1, 2, 4]) * draw.uniform(0.95, 1.05) for _ in range(num_hosts)]
    assert place(experts, hosts_of_speed(*speeds)).gap < 0.01


def test_thousands_of_experts_take_less_than_a_second() -> None:
    draw = random.Random(7)
    experts = [ExpertCost(draw.uniform(0.5, 1.5), draw.choice([1, 2])) for _ in range(4096)]
    hosts = [HostFacts(draw.choice([1, 2, 4]) * draw.uniform(0.95, 1.05), 30) for _ in range(512)]
    start = time.process_time()
    result = place(experts, hosts)
    assert time.process_time() - start < 1
    assert result.gap < 0.01
    assert fits(result.host_of, experts, hosts)


# --- invariance


@settings(deadline=None, max_examples=100)
@given(st.lists(works, max_size=9), st.lists(st.floats(1, 8), min_size=1, max_size=4), st.floats(1e-6, 1e6))
def test_a_common_factor_changes_nothing(
    work: list[float],
    speeds: list[float],
    factor: float,
) -> None:
    hosts = hosts_of_speed(*speeds)
    plain = place(experts_of_work(*work), hosts)
    scaled = place(experts_of_work(*(each * factor for each in work)), hosts)
    assert plain.host_of == scaled.host_of
    assert scaled.slowest == pytest.approx(plain.slowest * factor, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_experts_and_hosts_does_not_change_the_slowest_time(seed: int) -> None:
    experts, hosts = random_case(seed, (12, 4), (8, 3))
    draw = random.Random(seed)
    before = place(experts, hosts).slowest
    draw.shuffle(experts)
    draw.shuffle(hosts)
    assert place(experts, hosts).slowest == pytest.approx(before, rel=1e-9)


def test_the_result_is_deterministic() -> None:
    experts = experts_of_work(9, 7, 6, 5, 5, 4, 2, 0, 0)
    hosts = hosts_of_speed(1, 2, 4)
    assert place(experts, hosts) == place(list(experts), tuple(hosts))
    assert place(experts, hosts).host_of == (2, 1, 2, 0, 2, 1, 2, 0, 0)
    assert place(experts_of_work(1, 1, 1, 1), hosts_of_speed(1, 1)).host_of == (0, 1, 0, 1)


# --- edge cases


def test_no_experts_one_host_and_more_hosts_than_experts() -> None:
    assert place([], hosts_of_speed(1, 2)) == Placement((), (0.0, 0.0), 0.0, "exact", 0.0)
    assert place([], hosts_of_speed(1)).imbalance == 1.0
    assert place(experts_of_work(3, 1, 2), hosts_of_speed(2)).host_of == (0, 0, 0)
    assert place(experts_of_work(5), hosts_of_speed(1, 4, 2)).host_of == (1,)
    spread = place(experts_of_work(1, 1, 1), hosts_of_speed(1, 1, 1, 1, 1))
    assert len(set(spread.host_of)) == 3
    assert spread.seconds == (1, 1, 1, 0, 0)


def test_experts_without_work_go_to_the_hosts_with_the_fewest_experts() -> None:
    without_work = place(experts_of_work(*[0] * 8), hosts_of_speed(1, 2, 4))
    assert without_work.host_of == (0, 1, 2, 0, 1, 2, 0, 1), "counts as even as possible"
    mixed = place(experts_of_work(8, 0, 1, 1, 0, 1, 0, 0), hosts_of_speed(1, 1))
    assert [len(mixed.held(host)) for host in (0, 1)] == [4, 4]
    assert mixed.slowest == 8
    limited = place([ExpertCost(0, 1)] * 5, [HostFacts(1, memory=4), HostFacts(1, memory=1)])
    assert limited.host_of == (0, 1, 0, 0, 0)


def test_memory_of_other_layers_is_not_available() -> None:
    experts = [ExpertCost(1, 2), ExpertCost(1, 2)]
    hosts = [HostFacts(4, 4), HostFacts(1, 4)]
    assert place(experts, hosts).host_of == (0, 0)
    assert place(experts, hosts, used=(2, 0)).host_of == (0, 1)
    assert place(experts, hosts, used=(4, 0)).host_of == (1, 1)
    with pytest.raises(CannotPlace):
        place(experts, hosts, used=(4, 1))


@pytest.mark.parametrize("seed", range(10))
def test_many_experts_fit_into_tight_memory(seed: int) -> None:
    draw = random.Random(seed)
    experts = [ExpertCost(draw.paretovariate(1.2), draw.choice([100, 200, 400, 800])) for _ in range(80)]
    used = [draw.randrange(500) for _ in range(6)]
    # An assignment that fits, by construction, with the memory of one expert to spare on each host.
    memory = [800.0 + taken for taken in used]
    for expert in experts:
        memory[draw.randrange(6)] += expert.bytes
    hosts = [HostFacts(draw.choice([1, 2, 4]), each) for each in memory]
    assert fits(place(experts, hosts, used).host_of, experts, hosts, used)


# --- values and messages


def test_the_lower_bound() -> None:
    assert place(experts_of_work(2, 2, 2, 2), hosts_of_speed(1, 1)).bound == 4, "all work over all speed"
    assert place(experts_of_work(12, 1), hosts_of_speed(1, 4)).bound == 3, "the heaviest on the fastest"
    assert place(experts_of_work(8, 8, 1), hosts_of_speed(4, 4, 8)).bound == 16 / 12, (
        "the two heaviest on the two fastest"
    )


def test_a_placement_describes_itself() -> None:
    result = place(experts_of_work(6, 3, 2), hosts_of_speed(2, 1))
    assert (result.host_of, result.seconds, result.mean) == ((0, 1, 0), (4.0, 3.0), 11 / 3)
    assert (result.slowest, result.held(0), result.held(1)) == (4.0, (0, 2), (1,))
    assert result.imbalance == pytest.approx(12 / 11)
    assert result.gap == pytest.approx(1 / 11)
    text = "3 experts on 2 hosts (lpt): slowest host 1.09 of the mean, 9.1% above the lower bound"
    assert result.sentence() == text
    text = "1 expert on 1 host (exact): slowest host 1.00 of the mean"
    assert place(experts_of_work(5), hosts_of_speed(1)).sentence() == text
    text = "3 experts on 2 hosts (round_robin): slowest host 1.09 of the mean, 9.1% above the lower bound"
    assert round_robin(experts_of_work(6, 3, 2), hosts_of_speed(2, 1)).sentence() == text


def test_round_robin() -> None:
    result = round_robin(experts_of_work(1, 2, 3, 4), hosts_of_speed(1, 2, 4))
    assert (result.host_of, result.seconds, result.method) == ((0, 1, 2, 0), (5.0, 1.0, 0.75), "round_robin")
    assert result.bound == place(experts_of_work(1, 2, 3, 4), hosts_of_speed(1, 2, 4)).bound
    with pytest.raises(
        CannotPlace,
        match=r"host 0 \(a\) would hold experts of 3\.0 GiB; it has memory for 2\.0 GiB\. Move some",
    ):
        round_robin([ExpertCost(1, GIB)] * 5, [HostFacts(1, 3 * GIB, "a"), HostFacts(1)], used=(GIB, 0))


def test_an_assignment_of_the_user_is_checked() -> None:
    experts = experts_of_work(1, 2, 3)
    hosts = hosts_of_speed(1, 2)
    result = placement_of([1, 1, 0], experts, hosts)
    assert result.seconds == (3.0, 1.5)
    assert result.method == "file"
    with pytest.raises(
        ValueError, match="the placement has 2 host numbers; it needs a list of 3, one for each expert"
    ):
        placement_of([0, 1], experts, hosts)
    for wrong in (2, -1, True, 1.0, "1", None):
        with pytest.raises(
            ValueError, match=r"puts expert 1 on host .*; hosts are whole numbers from 0 to 1"
        ):
            placement_of([0, wrong, 0], experts, hosts)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(CannotPlace, match="host 1 would hold experts of 6 B; it has memory for 5 B"):
        placement_of([1, 1], [ExpertCost(1, 3)] * 2, [HostFacts(1), HostFacts(1, 5)])


@pytest.mark.parametrize(
    ("sizes", "memories", "phrases"),
    [
        (
            (GIB,) * 4,
            (1.5 * GIB, GIB),
            ("4 experts need 4.0 GiB", "2 hosts have memory for 2.5 GiB", "Use fewer or smaller experts"),
        ),
        ((1, 3 * GIB), (GIB, 2 * GIB), ("2 experts need 3.0 GiB", "memory for 3.0 GiB")),
        (
            (1, 3 * 2**20),
            (2**20, 2**21, 2**21),
            ("expert 1 needs 3.0 MiB", "the most memory is 2.0 MiB, on host 1 (n1)", "smaller"),
        ),
        (
            (4, 4, 4),
            (6, 6),
            (
                "3 experts need 12 B",
                "2 hosts have memory for 12 B",
                "no division of them among the hosts fits",
                "more memory",
            ),
        ),
        ((4,) * 25, (50, 50), ("25 experts need 100 B", "no division of them among the hosts fits")),
        ((5, 5, 2, 2, 2), (8, 8), ("5 experts need 16 B", "no division that fits was found")),
    ],
)
def test_experts_that_do_not_fit_are_refused_with_numbers(
    sizes: tuple[int, ...], memories: tuple[float, ...], phrases: tuple[str, ...]
) -> None:
    with pytest.raises(CannotPlace) as caught:
        place(
            [ExpertCost(1, size) for size in sizes],
            [HostFacts(1, memory, f"n{index}") for index, memory in enumerate(memories)],
        )
    assert [phrase for phrase in phrases if phrase not in str(caught.value)] == []


def test_wrong_facts_are_refused() -> None:
    for work, size in ((-1, 0), (math.nan, 0), (math.inf, 0), (1, -1), (1, math.inf)):
        with pytest.raises(
            ValueError, match=r"an expert's (work|bytes) is .*; it must be a number, 0 or more"
        ):
            ExpertCost(work, size)
    for speed, memory in ((0, 1), (-1, 1), (math.nan, 1), (math.inf, 1), (1, -1), (1, math.nan)):
        with pytest.raises(ValueError, match=r"a host's (speed|memory) is .*; it must be"):
            HostFacts(speed, memory)
    with pytest.raises(ValueError, match="3 experts cannot be placed on no host"):
        place(experts_of_work(1, 2, 3), [])
    with pytest.raises(ValueError, match="bytes in use are given for 1 host; there are 2"):
        place(experts_of_work(1), hosts_of_speed(1, 2), used=(0,))


# --- placement files


def test_a_file_is_for_all_layers_or_for_each() -> None:
    assert read_placement('{"host_of": [0, 2, 1]}', 2, (3, 3), 3) == [(0, 2, 1), (0, 2, 1)]
    assert read_placement('{"layers": [[0, 1], [1, 1, 0]]}', 2, (2, 3), 2) == [(0, 1), (1, 1, 0)]
    assert read_placement('{"layers": []}', 0, (), 2) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"host_of": [' + "9" * 5000 + "]}", "is not JSON"),
        ("[0, 1]", r"has \[0, 1\]; it needs \{\"host_of\""),
        ("null", "has None; it needs"),
        ("{}", r"has the keys \[\]; it needs"),
        ('{"host_of": [0, 1, 1], "layers": []}', r"has the keys \['host_of', 'layers'\]; it needs"),
        ('{"hosts": [0, 1, 1]}', r"has the keys \['hosts'\]; it needs"),
        ('{"layers": [[0, 1, 1]]}', 'has 1 layer under "layers"; the model needs a list of 2 MoE layers'),
        ('{"layers": 7}', 'has 7 under "layers"'),
        ('{"layers": [[0, 1, 1], 5]}', "layer 1 of the placement file has 5; it needs a list of 3"),
        ('{"host_of": "011"}', "layer 0 of the placement file has '011'; it needs a list of 3"),
        ('{"host_of": [0, 1]}', "layer 0 of the placement file has 2 host numbers; it needs a list of 3"),
        (
            '{"layers": [[0, 1, 1], [0, 1, 2]]}',
            "layer 1 of the placement file puts expert 2 on host 2; hosts are whole numbers from 0 to 1",
        ),
        ('{"host_of": [0, true, 1]}', "puts expert 1 on host True"),
        ('{"host_of": [0, NaN, 1]}', "puts expert 1 on host nan"),
        ('{"host_of": [0, 1, -1]}', "puts expert 2 on host -1"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_placement(text, 2, (3, 3), 2)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts", "message"),
    [
        ("[0, 1]", None, r"it needs \{\"host_of\""),
        ('{"layers": 7}', None, 'has 7 under "layers"; it needs a list'),
        ('{"layers": [[0], 5]}', None, "layer 1 of the placement file has 5; it needs a list"),
        ('{"host_of": "011"}', None, "layer 0 of the placement file has '011'"),
        ('{"host_of": [0, "1"]}', None, "puts expert 1 on host '1'; hosts are whole numbers from 0$"),
        ('{"host_of": [0, -1]}', None, "puts expert 1 on host -1"),
        ('{"host_of": [0, 1, 2]}', 2, "puts expert 2 on host 2; hosts are whole numbers from 0 to 1"),
    ],
)
def test_a_file_that_fits_no_model_is_refused_without_one(
    text: str,
    hosts: int | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        check_placement(text, hosts)
    with pytest.raises(ValueError):
        read_placement(text, 2, (3, 3), 2)


def test_a_file_that_fits_some_model_passes_without_one() -> None:
    check_placement('{"host_of": [0, 2, 1]}', None)
    check_placement('{"layers": [[0, 1], [1, 1, 0]]}', 2)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["host_of", "layers", "x"]) | st.text(), inner)
    ),
    max_leaves=8,
)


@given(json_values.map(json.dumps) | st.text())
def test_any_file_is_read_or_refused(text: str) -> None:
    per_layer: list[tuple[int, ...]] = []
    with contextlib.suppress(ValueError):
        per_layer = read_placement(text, 1, (2,), 3)
    assert all(host in range(3) for host_of in per_layer for host in host_of)
