"""The state of the decisions as JSON."""

from __future__ import annotations

import json

from experts.evolution.views import LayerState, PolicyState


def test_the_state_survives_json() -> None:
    layer = LayerState(2, {3: 1}, {4: 2}, 17, {5: 99})
    state = PolicyState({"a": layer, "b": LayerState()}, 0.25, 3)
    for some in (state, PolicyState()):
        assert json.loads(json.dumps(some.to_json())) == some.to_json()
        assert PolicyState.from_json(json.loads(json.dumps(some.to_json()))) == some
