"""The lengths of the segments in which expert hosts train."""

from __future__ import annotations

from collections import deque

_SEGMENT_SECONDS = 5.0
_FIRST_STEPS = 2
"""The length of a segment before the duration of a step is known."""
_MAX_GROWTH = 4
MAX_GRANTED = 3
"""Segments that the hosts may have at once: the one that they run, and two more.

So the hosts go on for ten seconds while the driver is slow or away. When the driver wants to change
the group, it waits for the segments that it has granted."""


class SegmentLengths:
    """Chooses the number of steps of each segment, so that a segment takes about five seconds.

    The hosts report how long a segment took: the driver may learn late that it has ended."""

    def __init__(self) -> None:
        self._steps = _FIRST_STEPS
        self._granted = deque[int]()
        """The lengths of the segments that the hosts have not finished."""
        self.begun = False
        """Whether the group has begun its first segment."""

    def begin_group(self) -> None:
        """Begin a new group, which has no segment yet."""
        self.begun = False
        self._granted.clear()

    def grant(self, steps_to_replay: int) -> int:
        """Return the length of the next segment, which is granted now.

        After a failure, the first segment has a single step, which ends the recovery time. The
        second one has the other lost steps (``steps_to_replay``), after which the recovery is
        recorded."""
        steps = self._steps
        if steps_to_replay:
            steps = steps_to_replay if self.begun else 1
        self.begun = True
        self._granted.append(steps)
        return steps

    def finish(self, seconds: float) -> None:
        """The hosts have finished the oldest of the granted segments."""
        steps = self._granted.popleft()
        # A few steps may be much faster or slower than the ones that follow.
        most = _MAX_GROWTH * max(steps, _FIRST_STEPS)
        self._steps = max(1, min(most, round(steps * _SEGMENT_SECONDS / max(1e-3, seconds))))
