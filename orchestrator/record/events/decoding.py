"""The decoder of plain values from JSON into frozen dataclasses, driven by the annotations of their fields.

A field whose value has another type than its annotation counts as absent: the others are kept. A value
without one of the fields that have no default is none at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Decoder = Callable[[Any], Any]
"""Returns a value of its type, or None for any other value."""

MAX_INTEGER = 2**53
"""A float counts exactly up to here."""
MAX_MEASURE = 1e100
"""Larger numbers are no measurements, and their products would overflow."""
_MAX_NUMBER = 1e300
_NOT_FINITE = ("nan", "inf", "-inf")
"""Numbers that JSON lacks, as they are written."""


def number(value: Any) -> float | None:
    """Return a number that may be nan or infinite: JSON carries these as text."""
    if type(value) is float:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < _MAX_NUMBER else None
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else None


def measure(value: Any) -> float | None:
    """Return a count or a measurement, which is finite and not negative."""
    is_number = type(value) is float or type(value) is int
    return value if is_number and 0 <= value < MAX_MEASURE else None


def finite(value: Any) -> float | None:
    """Return a number that sums can have."""
    known = number(value)
    return known if known is not None and abs(known) < _MAX_NUMBER else None


def whole(value: Any) -> int | None:
    return value if type(value) is int and -MAX_INTEGER < value < MAX_INTEGER else None


def count(value: Any) -> int | None:
    """Return a count, an index or an id."""
    return value if type(value) is int and 0 <= value < MAX_INTEGER else None


Finite = Annotated[float, finite]
Measure = Annotated[float, measure]
Count = Annotated[int, count]


def decode(cls: type[T], content: Any) -> T | None:
    """Return a dataclass from a mapping of its fields; None if one without a default is missing."""
    if not isinstance(content, dict):
        return None
    decoders, defaults, factories, num_required = _schema(cls)
    values = dict(defaults)
    for name, given in content.items():
        decoder = decoders.get(name)
        if decoder is not None and (value := decoder(given)) is not None:
            values[name] = value
    for name, factory in factories:
        if name not in values:
            values[name] = factory()
    if len(values) < num_required:
        return None
    # The constructor of a frozen dataclass calls a function for each field.
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", values)
    return made


def to_json(value: Any) -> Any:
    """Return the fields of a value that can be decoded: the argument ``default`` of ``json.dumps``.

    Fields of an event that have their default are left out: most events lack most of them."""
    if isinstance(value, deque):
        return list(value)
    kind = getattr(value, "EVENT", None)
    if kind is None:
        if hasattr(value, "to_json"):
            return value.to_json()
        if not is_dataclass(value):
            raise TypeError(f"{type(value).__name__} is no value of an event")
        return vars(value)
    defaults = _schema(type(value))[1]
    fields_of = {name: item for name, item in vars(value).items() if item != defaults.get(name, MISSING)}
    return {"event": kind, **fields_of}


@cache
def _schema(
    cls: type,
) -> tuple[dict[str, Decoder], dict[str, Any], tuple[tuple[str, Callable[[], Any]], ...], int]:
    """Return the decoder of each field, the defaults, the factories of others, and the number of all
    fields."""
    hints = get_type_hints(cls, include_extras=True)
    known = fields(cls)
    defaults = {field.name: field.default for field in known if field.default is not MISSING}
    factories = tuple(
        (field.name, field.default_factory) for field in known if field.default_factory is not MISSING
    )
    return {field.name: _decoder(hints[field.name]) for field in known}, defaults, factories, len(known)


def _decoder(hint: Any) -> Decoder:
    """Return the decoder of a type."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        return arguments[1]
    if origin in (Union, UnionType):
        return _decoder(next(each for each in arguments if each is not NoneType))
    if origin is Literal:
        return lambda value: value if isinstance(value, str) and value in arguments else None
    if origin in (tuple, list, deque):
        return _items_decoder(arguments[0], origin)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return partial(_values, _decoder(arguments[1]))
    if is_dataclass(hint):
        return partial(decode, hint)
    if _is_named_tuple(hint):
        hints = get_type_hints(hint, include_extras=True).values()
        return partial(_named_tuple, hint, list(map(_decoder, hints)))
    return _PLAIN[hint]


def _items_decoder(item: Any, made: type = tuple) -> Decoder:
    """Return the decoder of a list. One damaged number makes it damaged; other damaged items are None if
    they may be, empty if they are lists, and else left out."""
    decoder = _decoder(item)
    is_left_out = is_dataclass(item) or _is_named_tuple(item)
    if NoneType in get_args(item):
        replace = None
    elif get_origin(item) is tuple:
        replace = ()
    else:
        replace = _DAMAGED

    def decode_items(value: Any) -> Any:
        if not isinstance(value, list):
            return None
        # Events of the load of experts have thousands of counts.
        if decoder is measure and _are_measures(value):
            return made(value)
        items = [replace if (found := decoder(each)) is None else found for each in value]
        if is_left_out:
            return made(each for each in items if each is not _DAMAGED)
        return None if _DAMAGED in items else made(items)

    return decode_items


_DAMAGED = object()


def _are_measures(values: list[Any]) -> bool:
    """Return whether all items of a list are measures, without a call for each."""
    if not values or not {int, float}.issuperset(map(type, values)):
        return False
    # A sum with nan is nan, and not smaller than anything.
    return min(values) >= 0 and sum(values) < MAX_MEASURE


def _values(decoder: Decoder, value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    # Every step has metrics, nearly always as plain numbers.
    if decoder is number and {float}.issuperset(map(type, value.values())):
        return value
    return {name: found for name, item in value.items() if (found := decoder(item)) is not None}


def _is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple)


def _named_tuple(cls: type, decoders: list[Decoder], value: Any) -> Any:
    if not isinstance(value, list) or len(value) != len(decoders):
        return None
    items = [decoder(item) for decoder, item in zip(decoders, value, strict=True)]
    return None if None in items else cls(*items)


def _typed(expected: type) -> Decoder:
    return lambda value: value if isinstance(value, expected) else None


_PLAIN: Mapping[Any, Decoder] = {
    bool: _typed(bool),
    str: _typed(str),
    int: whole,
    float: number,
    Any: lambda value: value,
}
