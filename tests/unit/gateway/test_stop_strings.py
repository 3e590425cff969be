from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStringMatcher

ALPHABET = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def one_shot(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The rule as it is stated: the first to end wins, then the longer."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(ALPHABET, max_size=8), STOPS, st.booleans())
def test_pieces_equal_one_shot_f6(pieces: list[str], stops: list[str], include: bool) -> None:
    """F6: the cut does not depend on how the text arrives."""
    matcher = StopStringMatcher(stops, include=include)
    shown, hit = "", None
    for piece in pieces:
        scan = matcher.push(piece)
        shown, hit = shown + scan.text, scan.hit
        if hit is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, hit) == one_shot("".join(pieces), stops, include)


@given(st.lists(ALPHABET, max_size=8), STOPS)
def test_what_may_begin_a_stop_is_withheld_and_no_more_f6(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopStringMatcher(stops)
    arrived = shown = ""
    for piece in pieces:
        scan = matcher.push(piece)
        if scan.hit is not None:
            return
        arrived, shown = arrived + piece, shown + scan.text
        longest = max(
            (
                n
                for n in range(len(arrived) + 1)
                for s in stops
                if n < len(s) and arrived.endswith(s[:n])
            ),
            default=0,
        )
        assert shown == arrived[: len(arrived) - longest]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "hit"),
    [
        (["\n\n"], ["a\n", "\nb"], ["a", ""], "\n\n"),
        (["stop"], ["sto", "rm"], ["", "storm"], None),
        (["b", "abc"], ["ab"], ["a"], "b"),
        (["bc", "abc"], ["abc"], [""], "abc"),
        ([], ["x", ""], ["x", ""], None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: list[str], hit: str | None) -> None:
    matcher = StopStringMatcher(stops)
    scans = [matcher.push(piece) for piece in pieces]
    assert [scan.text for scan in scans] == shown
    assert scans[-1].hit == hit
