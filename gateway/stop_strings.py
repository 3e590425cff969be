"""Finds stop strings in text that arrives in pieces, and withholds what may be the start of one.

The stop string whose last character comes first wins; of two that end at the same character, the
longer. So the result does not depend on how the text is cut into pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class StopScan:
    """What one piece brought.

    Attributes:
        text: text that may be shown.
        hit: the stop string that was found; the text ends there.
    """

    text: str
    hit: str | None = None


class StopStringMatcher:
    """Matches the stop strings of one sequence.

    Args:
        stops: the strings; none is empty.
        include: whether the text keeps the stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Takes the next piece; not to be called after a hit."""
        if not self._stops or not text:
            return StopScan(text)
        buffer = self._held + text
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0),
            default=None,
        )
        if found:
            end, start, stop = found
            self._held = ""
            return StopScan(buffer[: end if self._include else start], stop)
        cut = len(buffer) - self._num_held(buffer)
        self._held = buffer[cut:]
        return StopScan(buffer[:cut])

    def flush(self) -> str:
        """What is withheld; at the end."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        """The length of the longest end of `buffer` that begins a stop string."""
        return max(_overlap(buffer, stop) for stop in self._stops)


def _overlap(buffer: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that ends `buffer`."""
    at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(buffer[at:]):
            return len(buffer) - at
        at = buffer.find(stop[0], at + 1)
    return 0
