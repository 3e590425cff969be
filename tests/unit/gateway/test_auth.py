import pytest

from gateway.auth import ApiKeys
from services.errors import UnauthenticatedError


def test_without_keys_the_api_is_open() -> None:
    ApiKeys(()).check(None)


@pytest.mark.parametrize("value", ["Bearer a-key", "bearer b-key", "Bearer  b-key "])
def test_a_right_key_passes(value: str) -> None:
    ApiKeys(("a-key", "b-key")).check(value)


@pytest.mark.parametrize(
    "value", [None, "", "a-key", "Basic a-key", "Bearer", "Bearer ", "Bearer a-ke", "Bearer é"]
)
def test_a_wrong_key_does_not(value: str | None) -> None:
    with pytest.raises(UnauthenticatedError):
        ApiKeys(("a-key",)).check(value)
