import pytest

from gateway.errors import (
    ContextLengthError,
    ModelNotFoundError,
    error_body,
    error_headers,
    http_error,
)
from services.errors import BY_CODE, ErrorCode, InternalError, UnauthenticatedError

STATUSES = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "UNIMPLEMENTED": (501, "invalid_request_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "server_error"),
    "INTERNAL": (500, "server_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
}


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_status(code: ErrorCode) -> None:
    error = BY_CODE[code]("why", param="p")
    kind = http_error(error)
    assert (kind.status, kind.type) == STATUSES[code]
    assert error_body(error)["error"]["param"] == "p"
    assert ("retry-after" in error_headers(error)) == (kind.status in (429, 503))


def test_codes_that_clients_look_for() -> None:
    assert http_error(ContextLengthError("x")).code == "context_length_exceeded"
    assert http_error(ModelNotFoundError("x")).code == "model_not_found"
    assert error_headers(UnauthenticatedError("x")) == {"www-authenticate": "Bearer"}


def test_internal_errors_show_the_trace_and_nothing_else() -> None:
    body = error_body(InternalError("/etc/secret failed"), "abc123")
    assert body["error"]["message"] == "internal error (trace abc123)"
    assert error_body(InternalError("/etc/secret"))["error"]["message"] == "internal error"
