"""One table from `services.errors` to HTTP and OpenAI's error shape, and the errors of HTTP alone.

ServiceError
├── InvalidArgumentError
│   ├── ContextLengthError          400, code context_length_exceeded
│   ├── BodyTooLargeError           413
│   ├── UnsupportedMediaTypeError   415
│   └── MethodNotAllowedError       405
└── NotFoundError
    ├── ModelNotFoundError          404, code model_not_found
    └── RouteNotFoundError          404
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.errors import (
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ServiceError,
)

RETRY_AFTER_S: Final = 1
"""What clients are told to wait when the engine is full or away."""
INTERNAL_MESSAGE: Final = "internal error"


class ContextLengthError(InvalidArgumentError):
    """Prompt and output do not fit into the model's context."""


class BodyTooLargeError(InvalidArgumentError):
    """The request's body is over the limit."""


class UnsupportedMediaTypeError(InvalidArgumentError):
    """The body is not declared as JSON."""


class MethodNotAllowedError(InvalidArgumentError):
    """The route exists, with another method."""


class ModelNotFoundError(NotFoundError):
    """No served model has this name."""


class RouteNotFoundError(NotFoundError):
    """No such route."""


@dataclass(slots=True, frozen=True)
class HttpError:
    """How an error looks over HTTP.

    Attributes:
        status: the HTTP status.
        type: OpenAI's `type`.
        code: OpenAI's `code`.
        retry_after_s: sent as Retry-After.
    """

    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None


_REQUEST: Final = "invalid_request_error"
_BY_CODE: Final[Mapping[ErrorCode, HttpError]] = {
    ErrorCode.INVALID_ARGUMENT: HttpError(400, _REQUEST),
    ErrorCode.OUT_OF_RANGE: HttpError(400, _REQUEST),
    ErrorCode.FAILED_PRECONDITION: HttpError(400, _REQUEST),
    ErrorCode.UNAUTHENTICATED: HttpError(401, "authentication_error", "invalid_api_key"),
    ErrorCode.PERMISSION_DENIED: HttpError(403, "permission_error"),
    ErrorCode.NOT_FOUND: HttpError(404, _REQUEST),
    ErrorCode.ALREADY_EXISTS: HttpError(409, _REQUEST),
    ErrorCode.RESOURCE_EXHAUSTED: HttpError(429, "rate_limit_error", None, RETRY_AFTER_S),
    ErrorCode.UNIMPLEMENTED: HttpError(501, _REQUEST, "unsupported_parameter"),
    ErrorCode.UNAVAILABLE: HttpError(503, "server_error", None, RETRY_AFTER_S),
    ErrorCode.DEADLINE_EXCEEDED: HttpError(504, "server_error"),
    ErrorCode.INTERNAL: HttpError(500, "server_error"),
}
_BY_CLASS: Final[Mapping[type[ServiceError], HttpError]] = {
    ContextLengthError: HttpError(400, _REQUEST, "context_length_exceeded"),
    BodyTooLargeError: HttpError(413, _REQUEST, "request_too_large"),
    UnsupportedMediaTypeError: HttpError(415, _REQUEST, "unsupported_media_type"),
    MethodNotAllowedError: HttpError(405, _REQUEST, "method_not_allowed"),
    ModelNotFoundError: HttpError(404, _REQUEST, "model_not_found"),
    RouteNotFoundError: HttpError(404, _REQUEST, "not_found"),
}


def http_error(error: ServiceError) -> HttpError:
    """How an error looks over HTTP."""
    return _BY_CLASS.get(type(error)) or _BY_CODE[error.code]


def error_headers(error: ServiceError) -> dict[str, str]:
    """The headers that an error's response needs."""
    headers: dict[str, str] = {}
    kind = http_error(error)
    if kind.retry_after_s is not None:
        headers["retry-after"] = str(kind.retry_after_s)
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_body(error: ServiceError, trace_id: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; an internal error shows its trace id and nothing else."""
    kind = http_error(error)
    message = error.message
    if isinstance(error, InternalError):
        message = INTERNAL_MESSAGE + (f" (trace {trace_id})" if trace_id else "")
    return {
        "error": {
            "message": message,
            "type": kind.type,
            "param": error.param,
            "code": kind.code,
        }
    }
