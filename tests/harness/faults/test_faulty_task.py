"""The functions of the product by which the faulty task knows its phase."""

from __future__ import annotations

import pytest

from harness.faults.faulty_task import WRAPPED, WrappedFunction, find_owner


@pytest.mark.parametrize("function", WRAPPED, ids=lambda function: function.name)
def test_a_wrapped_function_exists(function: WrappedFunction) -> None:
    """Found here in milliseconds; a run on a cluster would fail with it."""
    owner, name = find_owner(function)
    assert callable(getattr(owner, name))
