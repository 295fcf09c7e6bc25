"""Places of a layer's experts in the drawings of its graph: the same from the first graph to the last.

An expert keeps its place for life. A newborn takes the nearest free place to its parent, a merged
expert one between its parents. The same graphs always give the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.record.events.kinds import GraphLayer

Point = tuple[float, float]
"""At most MAX_RADIUS from the origin."""

MAX_RADIUS = 0.85
CIRCLE_RADIUS = 0.75
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))
MAX_SPACING = 0.6
NUM_ANGLES = 16
MAX_ANCESTORS = 64
_ORIGIN: Point = (0.0, 0.0)


def spacing(layers: Sequence[GraphLayer]) -> float:
    """Return the distance that neighbouring experts keep, by the largest number of experts at a time."""
    largest = max((len(layer.experts) for layer in layers), default=1)
    return min(MAX_SPACING, 1.3 / math.sqrt(largest))


def expert_places(layers: Sequence[GraphLayer], parents: Mapping[int, Sequence[int]]) -> dict[int, Point]:
    """Return the place of each expert by id, given a layer's graphs in order and the parents of its experts.

    ``parents`` may name experts that no graph shows, since they lived between two graphs."""
    places: dict[int, Point] = {}
    distance = spacing(layers)
    for layer in layers:
        if not places:
            # Children of experts that the first graph shows are placed near these.
            ids = set(layer.ids)
            first = [expert for expert in sorted(ids) if not ids & set(parents.get(expert, ()))]
            places = dict(zip(first, _initial_places(len(first), distance), strict=True))
        for expert in sorted(set(layer.ids) - set(places)):
            # Experts that are gone have left their places.
            taken = [places[other] for other in layer.ids if other in places]
            places[expert] = _free_place(_anchor(expert, parents, places), taken, distance)
    return places


def _initial_places(count: int, distance: float) -> list[Point]:
    """Return places on a circle, or on a spiral that fills it if the circle is too short."""
    chord = 2 * CIRCLE_RADIUS * math.sin(math.pi / count) if count > 1 else math.inf
    if chord >= distance:
        # The first one at the top, the others clockwise.
        angles = [2 * math.pi * index / count - math.pi / 2 for index in range(count)]
        radius = CIRCLE_RADIUS if count > 1 else 0.0
        return [(radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]
    radii = [MAX_RADIUS * math.sqrt((index + 0.5) / count) for index in range(count)]
    return [
        (radius * math.cos(index * GOLDEN_ANGLE), radius * math.sin(index * GOLDEN_ANGLE))
        for index, radius in enumerate(radii)
    ]


def _anchor(expert: int, parents: Mapping[int, Sequence[int]], places: Mapping[int, Point]) -> Point:
    """Return the mean place of an expert's nearest known ancestors; the middle if it has none."""
    ancestors = list(parents.get(expert, ()))
    for _ in range(MAX_ANCESTORS):
        known = [places[ancestor] for ancestor in ancestors if ancestor in places]
        if known:
            return (sum(x for x, _ in known) / len(known), sum(y for _, y in known) / len(known))
        ancestors = [older for ancestor in ancestors for older in parents.get(ancestor, ())]
        if not ancestors:
            break
    return _ORIGIN


def _free_place(anchor: Point, taken: Sequence[Point], distance: float) -> Point:
    """Return the place nearest to the anchor that keeps a distance from the others; less if it is crowded."""
    while True:
        for place in _places_around(anchor, distance / 4):
            if all(math.dist(place, other) >= distance - 1e-9 for other in taken):
                return place
        distance *= 0.8


def _places_around(anchor: Point, step: float) -> Iterator[Point]:
    """Return the anchor and places on growing circles around it, all within reach of the origin."""
    num_circles = math.ceil(2 / step)
    for circle in range(num_circles + 1):
        for index in range(NUM_ANGLES if circle else 1):
            angle = 2 * math.pi * index / NUM_ANGLES
            x = anchor[0] + circle * step * math.cos(angle)
            y = anchor[1] + circle * step * math.sin(angle)
            if math.hypot(x, y) <= MAX_RADIUS:
                yield x, y
