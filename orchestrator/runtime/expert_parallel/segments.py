"""The lengths of the segments in which expert hosts train."""

from __future__ import annotations

_SEGMENT_SECONDS = 2.0
_FIRST_STEPS = 5
"""The length of a segment before the duration of a step is known."""
_MAX_GROWTH = 4


class SegmentLengths:
    """Chooses the number of steps of each segment, so that a segment takes about two seconds.

    Between segments the driver can act, and each costs a call to every host."""

    def __init__(self) -> None:
        self._steps = _FIRST_STEPS
        self._began_at = 0.0
        self.begun = False
        """Whether the group has begun its first segment."""

    def begin_group(self) -> None:
        """Begin a new group: the time until its first segment is not the time of a segment."""
        self.begun = False

    def next_length(self, now: float, steps_to_replay: int) -> int:
        """Return the length of the segment that begins now.

        After a failure, the first segment has a single step, which ends the recovery time. The
        second one has the other lost steps (``steps_to_replay``), after which the recovery is
        recorded."""
        is_first = not self.begun
        elapsed_s = now - self._began_at
        self.begun = True
        self._began_at = now
        if steps_to_replay:
            return 1 if is_first else steps_to_replay
        if not is_first:
            steps = round(self._steps * _SEGMENT_SECONDS / max(1e-3, elapsed_s))
            self._steps = max(1, min(_MAX_GROWTH * self._steps, steps))
        return self._steps
