import pytest

from gateway.generation import child_seed


@pytest.mark.parametrize(
    ("seed", "j", "expected"),
    [
        (7, 0, 7),
        (7, 2, 9),
        (-1, 1, 0),
        (2**63 - 1, 1, -(2**63)),
        (-(2**63), 0, -(2**63)),
    ],
)
def test_child_seeds_follow_and_wrap_d6(seed: int, j: int, expected: int) -> None:
    assert child_seed(seed, j) == expected
