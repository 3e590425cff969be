import pytest

from services.errors import BY_CODE, ErrorCode, ServiceError, UnavailableError
from services.request_errors import from_proto, to_proto

ON_THE_STREAM = [
    ErrorCode.INVALID_ARGUMENT,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE,
    ErrorCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS,
    ErrorCode.INTERNAL,
]


def test_every_code_has_one_class() -> None:
    assert set(BY_CODE) == set(ErrorCode)
    assert all(issubclass(cls, ServiceError) for cls in BY_CODE.values())


@pytest.mark.parametrize("code", ON_THE_STREAM)
def test_a_request_error_survives_the_wire(code: ErrorCode) -> None:
    back = from_proto(to_proto(BY_CODE[code]("what", param="which")))
    assert (back.code, back.message, back.param) == (code, "what", "which")


def test_retryable_is_told() -> None:
    assert to_proto(UnavailableError("later")).retryable is True
    assert to_proto(BY_CODE[ErrorCode.INVALID_ARGUMENT]("never")).retryable is False


def test_no_param_stays_unset() -> None:
    wire = to_proto(UnavailableError("later"))
    assert not wire.HasField("param")
    assert from_proto(wire).param is None
