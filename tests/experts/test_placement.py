"""Placement against enumeration where that can be done, and against simple rules and the lower bound where it cannot."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st

from experts import placement, placement_search
from experts.placement import (
    CannotPlace,
    ExpertCost,
    HostFacts,
    Placement,
    check_placement,
    given,
    place,
    read_placement,
    round_robin,
)

GIB = 2**30
works = st.one_of(st.integers(0, 9), st.floats(1e-3, 1e15)).map(float)


def of_work(*work: float) -> list[ExpertCost]:
    return [ExpertCost(each) for each in work]


def of_speed(*speed: float) -> list[HostFacts]:
    return [HostFacts(each) for each in speed]


def fits(
    host_of: Sequence[int],
    experts: Sequence[ExpertCost],
    hosts: Sequence[HostFacts],
    used: Sequence[float] = (),
) -> bool:
    needed = list(used) or [0.0] * len(hosts)
    for expert, host in zip(experts, host_of, strict=True):
        needed[host] += expert.bytes
    return all(need <= host.memory for need, host in zip(needed, hosts, strict=True))


def slowest(host_of: Sequence[int], experts: Sequence[ExpertCost], hosts: Sequence[HostFacts]) -> float:
    load = [0.0] * len(hosts)
    for expert, host in zip(experts, host_of, strict=True):
        load[host] += expert.work
    return max(each / host.speed for each, host in zip(load, hosts, strict=True))


def optimum(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts]) -> float:
    """Every assignment there is; infinity if none fits."""
    every = itertools.product(range(len(hosts)), repeat=len(experts))
    return min(
        (slowest(each, experts, hosts) for each in every if fits(each, experts, hosts)), default=math.inf
    )


def random_case(seed: int, *shapes: tuple[int, int]) -> tuple[list[ExpertCost], list[HostFacts]]:
    """Heavy-tailed loads on hosts of speeds 1:2:4, measured speeds, or equal ones. A shape is most experts × hosts."""
    draw = random.Random(seed)
    most, count = draw.choice(shapes)
    speeds = draw.choice([[1, 2, 4, 4, 2, 1, 4], [draw.uniform(1, 8) for _ in range(count)], [1] * count])
    shape = draw.choice([0.8, 1.2, 3.0])
    return of_work(*(round(100 * draw.paretovariate(shape)) for _ in range(draw.randint(1, most)))), of_speed(
        *speeds[:count]
    )


def contiguous(experts: int, hosts: int) -> list[int]:
    return [expert * hosts // experts for expert in range(experts)]


def equal_counts(experts: Sequence[ExpertCost], hosts: Sequence[HostFacts]) -> list[int]:
    """Heaviest first to the least loaded host that does not yet hold its share."""
    share, load, held, host_of = (
        -(-len(experts) // len(hosts)),
        [0.0] * len(hosts),
        [0] * len(hosts),
        [0] * len(experts),
    )
    for expert in sorted(range(len(experts)), key=lambda e: -experts[e].work):
        host = min((h for h in range(len(hosts)) if held[h] < share), key=lambda h: load[h])
        host_of[expert], held[host], load[host] = host, held[host] + 1, load[host] + experts[expert].work
    return host_of


# --- the best there is


@pytest.mark.parametrize("seed", range(120))
def test_small_cases_equal_enumeration(seed: int) -> None:
    experts, hosts = random_case(seed, (6, 3), (7, 2), (5, 4))
    found = place(experts, hosts)
    assert found.method == "exact"
    assert found.slowest == pytest.approx(optimum(experts, hosts), rel=1e-8)
    assert found.bound <= found.slowest * (1 + 1e-12)


@settings(deadline=None, max_examples=150)
@cases(
    st.lists(st.builds(ExpertCost, works, st.integers(0, 6)), max_size=6),
    st.lists(
        st.builds(HostFacts, st.sampled_from([1, 2, 4, 4.5]), st.sampled_from([0, 2, 5, 6, 7, 9, math.inf])),
        min_size=1,
        max_size=3,
    ),
)
def test_memory_is_kept_and_nothing_that_fits_is_refused(
    experts: list[ExpertCost], hosts: list[HostFacts]
) -> None:
    best = optimum(experts, hosts)
    if best == math.inf:
        with pytest.raises(CannotPlace):
            place(experts, hosts)
        return
    found = place(experts, hosts)
    assert fits(found.host_of, experts, hosts)
    assert found.slowest == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", range(150))
def test_the_search_alone_equals_enumeration(seed: int) -> None:
    """Few different experts and hosts, so that those alike are many, and memory that is often just enough."""
    draw = random.Random(seed)
    experts = [
        ExpertCost(draw.choice([0, 2, 3, 3, 5]), draw.choice([1, 2])) for _ in range(draw.randint(1, 7))
    ]
    hosts = [
        HostFacts(draw.choice([1, 2]), draw.choice([3, 4, math.inf])) for _ in range(draw.choice([2, 3]))
    ]
    search = placement_search.Search(placement._task(experts, hosts, ()), math.inf, 10**6)
    found = slowest(search.best, experts, hosts) if search.best else math.inf
    assert found == optimum(experts, hosts)


@pytest.mark.parametrize("kinds", [[1], [1, 2, 4], [1, 1.001, 1.002], [1, 2, 4, None], [None]])
@pytest.mark.parametrize("shape", [(7, 3), (90, 8), (300, 40), (500, 200)])
def test_the_queues_find_what_a_scan_finds(shape: tuple[int, int], kinds: list[float | None]) -> None:
    """On hosts of few speeds, of a speed each (None), and of both."""
    draw = random.Random(5)
    experts = [
        ExpertCost(
            draw.choice([0, draw.randint(1, 9), round(100 * draw.paretovariate(1))]), draw.randint(1, 4)
        )
        for _ in range(shape[0])
    ]
    hosts = [
        HostFacts(draw.choice(kinds) or draw.uniform(1, 4), 4 * shape[0] / shape[1]) for _ in range(shape[1])
    ]
    task = placement._task(experts, hosts, ())
    order = draw.choice(
        [
            sorted(range(shape[0]), key=lambda e: (-task.work[e], -task.bytes[e])),
            draw.sample(range(shape[0]), shape[0]),
        ]
    )
    load, free, held, host_of = [0.0] * shape[1], list(task.room), [0] * shape[1], [0] * shape[0]
    for expert in order:
        work, size = task.work[expert], task.bytes[expert]
        done = {h: (load[h] + work) / task.speed[h] for h in range(shape[1]) if free[h] >= size}
        host = min(done, key=lambda h: (done[h], held[h]) if work else (held[h], done[h]))
        host_of[expert], load[host], free[host], held[host] = (
            host,
            load[host] + work,
            free[host] - size,
            held[host] + 1,
        )
    assert placement_search.greedy(task, order) == host_of


@pytest.mark.parametrize("block", range(10))
def test_the_heuristic_alone_is_within_five_percent(block: int) -> None:
    for seed in range(1000 + 40 * block, 1040 + 40 * block):
        experts, hosts = random_case(seed, (6, 3), (7, 2), (5, 4), (4, 5))
        host_of, _ = placement_search.heuristic(placement._task(experts, hosts, ()))
        assert host_of is not None
        assert slowest(host_of, experts, hosts) <= 1.05 * optimum(experts, hosts), (seed, experts, hosts)


def test_where_the_search_does_not_end_the_heuristic_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, hosts = of_work(*(100 + 7 * e % 31 for e in range(13))), of_speed(1, 2, 4.1)
    best = place(experts, hosts)
    monkeypatch.setattr(placement, "_SEARCH_TRIES", 10)
    found = place(experts, hosts)
    assert (best.method, found.method) == ("exact", "lpt")
    assert best.slowest <= found.slowest <= 1.05 * best.slowest


@pytest.mark.parametrize("seed", range(40))
def test_never_worse_than_the_simple_rules(seed: int) -> None:
    experts, hosts = random_case(seed, (8, 3), (30, 4), (60, 7), (250, 7))
    ours = place(experts, hosts).slowest * (1 - 1e-9)
    assert ours <= round_robin(experts, hosts).slowest
    assert ours <= slowest(contiguous(len(experts), len(hosts)), experts, hosts)
    assert ours <= slowest(equal_counts(experts, hosts), experts, hosts)


@pytest.mark.parametrize("shape", [(64, 7), (256, 8), (256, 64)])
def test_many_experts_come_near_the_lower_bound(shape: tuple[int, int]) -> None:
    draw = random.Random(7)
    experts = of_work(*(draw.uniform(0.5, 1.5) for _ in range(shape[0])))
    assert (
        place(
            experts, of_speed(*(draw.choice([1, 2, 4]) * draw.uniform(0.95, 1.05) for _ in range(shape[1])))
        ).gap
        < 0.01
    )


def test_thousands_of_experts_take_less_than_a_second() -> None:
    draw = random.Random(7)
    experts = [ExpertCost(draw.uniform(0.5, 1.5), draw.choice([1, 2])) for _ in range(4096)]
    hosts = [HostFacts(draw.choice([1, 2, 4]) * draw.uniform(0.95, 1.05), 30) for _ in range(512)]
    begun = time.process_time()
    found = place(experts, hosts)
    assert time.process_time() - begun < 1
    assert found.gap < 0.01
    assert fits(found.host_of, experts, hosts)


# --- what it does not depend on


@settings(deadline=None, max_examples=100)
@cases(st.lists(works, max_size=9), st.lists(st.floats(1, 8), min_size=1, max_size=4), st.floats(1e-6, 1e6))
def test_a_common_factor_changes_nothing(work: list[float], speeds: list[float], factor: float) -> None:
    plain, scaled = (
        place(of_work(*work), of_speed(*speeds)),
        place(of_work(*(each * factor for each in work)), of_speed(*speeds)),
    )
    assert plain.host_of == scaled.host_of
    assert scaled.slowest == pytest.approx(plain.slowest * factor, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_experts_and_hosts_changes_no_time(seed: int) -> None:
    experts, hosts = random_case(seed, (12, 4), (8, 3))
    draw = random.Random(seed)
    before = place(experts, hosts).slowest
    draw.shuffle(experts)
    draw.shuffle(hosts)
    assert place(experts, hosts).slowest == pytest.approx(before, rel=1e-9)


def test_the_result_is_always_the_same() -> None:
    experts, hosts = of_work(9, 7, 6, 5, 5, 4, 2, 0, 0), of_speed(1, 2, 4)
    assert place(experts, hosts) == place(list(experts), tuple(hosts))
    assert place(experts, hosts).host_of == (2, 1, 2, 0, 2, 1, 2, 0, 0)
    assert place(of_work(1, 1, 1, 1), of_speed(1, 1)).host_of == (0, 1, 0, 1)


# --- ordinary edges


def test_no_experts_one_host_and_more_hosts_than_experts() -> None:
    assert place([], of_speed(1, 2)) == Placement((), (0.0, 0.0), 0.0, "exact", 0.0)
    assert place([], of_speed(1)).imbalance == 1.0
    assert place(of_work(3, 1, 2), of_speed(2)).host_of == (0, 0, 0)
    assert place(of_work(5), of_speed(1, 4, 2)).host_of == (1,)
    spread = place(of_work(1, 1, 1), of_speed(1, 1, 1, 1, 1))
    assert len(set(spread.host_of)) == 3
    assert spread.seconds == (1, 1, 1, 0, 0)


def test_experts_without_work_go_where_the_fewest_are() -> None:
    assert place(of_work(*[0] * 8), of_speed(1, 2, 4)).host_of == (0, 1, 2, 0, 1, 2, 0, 1), (
        "the counts are as even as they can be"
    )
    among_others = place(of_work(8, 0, 1, 1, 0, 1, 0, 0), of_speed(1, 1))
    assert [len(among_others.held(host)) for host in (0, 1)] == [4, 4]
    assert among_others.slowest == 8
    by_memory = [ExpertCost(0, 1)] * 5, [HostFacts(1, memory=4), HostFacts(1, memory=1)]
    assert place(*by_memory).host_of == (0, 1, 0, 0, 0)


def test_the_search_spreads_experts_without_work_too() -> None:
    experts, hosts = of_work(*[0] * 6, 31, 30, 27, 25, 24, 19, 17, 11), of_speed(1, 1.9, 4.2)
    found = placement_search.Search(placement._task(experts, hosts, ()), math.inf, 10_000).best
    assert found is not None
    assert sorted(map(found.count, range(3))) == [4, 5, 5]


def test_what_other_layers_use_is_not_there() -> None:
    experts, hosts = [ExpertCost(1, 2), ExpertCost(1, 2)], [HostFacts(4, 4), HostFacts(1, 4)]
    assert place(experts, hosts).host_of == (0, 0)
    assert place(experts, hosts, used=(2, 0)).host_of == (0, 1)
    assert place(experts, hosts, used=(4, 0)).host_of == (1, 1)
    with pytest.raises(CannotPlace):
        place(experts, hosts, used=(4, 1))


@pytest.mark.parametrize("seed", range(10))
def test_tight_memory_is_kept_with_many_experts(seed: int) -> None:
    draw = random.Random(seed)
    experts = [ExpertCost(draw.paretovariate(1.2), draw.choice([100, 200, 400, 800])) for _ in range(80)]
    used, needed = [draw.randrange(500) for _ in range(6)], [800.0] * 6
    for expert in experts:
        needed[draw.randrange(6)] += expert.bytes
    hosts = [
        HostFacts(draw.choice([1, 2, 4]), need + taken) for need, taken in zip(needed, used, strict=True)
    ]
    assert fits(place(experts, hosts, used).host_of, experts, hosts, used)


# --- values and words


def test_the_lower_bound() -> None:
    assert place(of_work(2, 2, 2, 2), of_speed(1, 1)).bound == 4, "all work over all speed"
    assert place(of_work(12, 1), of_speed(1, 4)).bound == 3, "the heaviest on the fastest"
    assert place(of_work(8, 8, 1), of_speed(4, 4, 8)).bound == 16 / 12, "the two heaviest on the two fastest"


def test_a_placement_tells_about_itself() -> None:
    found = place(of_work(6, 3, 2), of_speed(2, 1))
    assert (found.host_of, found.seconds, found.mean) == ((0, 1, 0), (4.0, 3.0), 11 / 3)
    assert (found.slowest, found.held(0), found.held(1)) == (4.0, (0, 2), (1,))
    assert found.imbalance == pytest.approx(12 / 11)
    assert found.gap == pytest.approx(1 / 11)
    assert (
        found.sentence()
        == "3 experts on 2 hosts (exact): slowest host 1.09 of the mean, 9.1% above the lower bound"
    )
    assert (
        place(of_work(5), of_speed(1)).sentence()
        == "1 expert on 1 host (exact): slowest host 1.00 of the mean, 0.0% above the lower bound"
    )


def test_round_robin() -> None:
    found = round_robin(of_work(1, 2, 3, 4), of_speed(1, 2, 4))
    assert (found.host_of, found.seconds, found.method) == ((0, 1, 2, 0), (5.0, 1.0, 0.75), "round_robin")
    assert found.bound == place(of_work(1, 2, 3, 4), of_speed(1, 2, 4)).bound
    with pytest.raises(
        CannotPlace,
        match=r"host 0 \(a\) would hold experts of 3\.0 GiB; it has room for 2\.0 GiB\. Move some",
    ):
        round_robin([ExpertCost(1, GIB)] * 5, [HostFacts(1, 3 * GIB, "a"), HostFacts(1)], used=(GIB, 0))


def test_a_placement_given() -> None:
    experts, hosts = of_work(1, 2, 3), of_speed(1, 2)
    assert (given([1, 1, 0], experts, hosts).seconds, given([1, 1, 0], experts, hosts).method) == (
        (3.0, 1.5),
        "file",
    )
    with pytest.raises(
        ValueError, match="the placement has 2 host numbers; it needs a list of 3, one for each expert"
    ):
        given([0, 1], experts, hosts)
    for wrong in (2, -1, True, 1.0, "1", None):
        with pytest.raises(
            ValueError, match=r"puts expert 1 on host .*; hosts are whole numbers from 0 to 1"
        ):
            given([0, wrong, 0], experts, hosts)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CannotPlace, match="host 1 would hold experts of 6 B; it has room for 5 B"):
        given([1, 1], [ExpertCost(1, 3)] * 2, [HostFacts(1), HostFacts(1, 5)])


@pytest.mark.parametrize(
    ("sizes", "memories", "words"),
    [
        (
            (GIB,) * 4,
            (1.5 * GIB, GIB),
            ("4 experts need 4.0 GiB", "2 hosts have room for 2.5 GiB", "Use fewer or smaller experts"),
        ),
        ((1, 3 * GIB), (GIB, 2 * GIB), ("2 experts need 3.0 GiB", "room for 3.0 GiB")),
        (
            (1, 3 * 2**20),
            (2**20, 2**21, 2**21),
            ("expert 1 needs 3.0 MiB", "the most room is 2.0 MiB, on host 1 (n1)", "smaller"),
        ),
        (
            (4, 4, 4),
            (6, 6),
            (
                "3 experts need 12 B",
                "2 hosts have room for 12 B",
                "no division of them among the hosts fits",
                "more room",
            ),
        ),
        ((4,) * 25, (50, 50), ("25 experts need 100 B", "no division that fits was found")),
    ],
)
def test_what_does_not_fit_is_told_with_numbers(
    sizes: tuple[int, ...], memories: tuple[float, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(CannotPlace) as caught:
        place(
            [ExpertCost(1, size) for size in sizes],
            [HostFacts(1, memory, f"n{index}") for index, memory in enumerate(memories)],
        )
    assert [word for word in words if word not in str(caught.value)] == []


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
        place(of_work(1, 2, 3), [])
    with pytest.raises(ValueError, match="bytes in use are given for 1 host; there are 2"):
        place(of_work(1), of_speed(1, 2), used=(0,))


# --- placement files


def test_a_file_for_every_layer_or_for_each() -> None:
    assert read_placement('{"host_of": [0, 2, 1]}', 2, (3, 3), 3) == [(0, 2, 1), (0, 2, 1)]
    assert read_placement('{"layers": [[0, 1], [1, 1, 0]]}', 2, (2, 3), 2) == [(0, 1), (1, 1, 0)]
    assert read_placement('{"layers": []}', 0, (), 2) == []


@pytest.mark.parametrize(
    ("text", "words"),
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
def test_a_wrong_file_is_told_in_a_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_placement(text, 2, (3, 3), 2)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts", "words"),
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
def test_a_file_that_can_be_right_for_no_model_is_told_without_one(
    text: str, hosts: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_placement(text, hosts)
    with pytest.raises(ValueError):
        read_placement(text, 2, (3, 3), 2)


def test_a_file_that_is_right_for_some_model_passes_without_one() -> None:
    check_placement('{"host_of": [0, 2, 1]}', None)
    check_placement('{"layers": [[0, 1], [1, 1, 0]]}', 2)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["host_of", "layers", "x"]) | st.text(), inner)
    ),
    max_leaves=8,
)


@cases(json_values.map(json.dumps) | st.text())
def test_any_file_is_read_or_refused(text: str) -> None:
    found: list[tuple[int, ...]] = []
    with contextlib.suppress(ValueError):
        found = read_placement(text, 1, (2,), 3)
    assert all(host in range(3) for host_of in found for host in host_of)
