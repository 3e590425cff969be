"""The engine's one source of time."""

import time


class Clock:
    """Unix time in nanoseconds that never goes back.

    Anchored once to the wall clock and advanced by the monotonic one, so that intervals between
    two readings are never negative even when the machine's time is set.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return self._offset_ns + time.monotonic_ns()
