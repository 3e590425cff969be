"""The errors that cross a process boundary.

    ServiceError
    ├── client's fault
    │   ├── InvalidArgumentError      malformed or out of range whatever the state
    │   ├── OutOfRangeError           out of the range that holds now
    │   ├── UnauthenticatedError
    │   ├── PermissionDeniedError
    │   ├── NotFoundError
    │   ├── AlreadyExistsError
    │   ├── FailedPreconditionError   wrong order of calls, fenced epoch
    │   └── UnimplementedError        the feature is not built
    └── server's state
        ├── ResourceExhaustedError    admission limits; retryable
        ├── UnavailableError          starting, recovering, draining; retryable
        ├── DeadlineExceededError
        └── InternalError             says nothing of the inside

Domain code raises these and knows neither gRPC nor HTTP; the edges map them (`interceptor` to gRPC
statuses, the gateway to HTTP).
"""

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    """The kinds of error, named as gRPC's status codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class ServiceError(Exception):
    """An error that may be shown to the caller.

    Args:
        message: for people; no prompt text and nothing internal.
        param: the parameter at fault, when there is one.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidArgumentError(ServiceError):
    """Malformed or out of range; the same call fails again."""

    code = ErrorCode.INVALID_ARGUMENT


class OutOfRangeError(ServiceError):
    """Out of the range that holds now."""

    code = ErrorCode.OUT_OF_RANGE


class UnauthenticatedError(ServiceError):
    """No credentials, or wrong ones."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDeniedError(ServiceError):
    """Known caller, not allowed."""

    code = ErrorCode.PERMISSION_DENIED


class NotFoundError(ServiceError):
    """No such model, file or request."""

    code = ErrorCode.NOT_FOUND


class AlreadyExistsError(ServiceError):
    """A live request has this id."""

    code = ErrorCode.ALREADY_EXISTS


class FailedPreconditionError(ServiceError):
    """Calls in the wrong order, or a fenced epoch."""

    code = ErrorCode.FAILED_PRECONDITION


class UnimplementedError(ServiceError):
    """The feature is not built."""

    code = ErrorCode.UNIMPLEMENTED


class ResourceExhaustedError(ServiceError):
    """An admission limit was reached, or memory is short."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    retryable = True


class UnavailableError(ServiceError):
    """Starting, recovering or draining."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class DeadlineExceededError(ServiceError):
    """The request's deadline passed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class InternalError(ServiceError):
    """A fault of ours."""

    code = ErrorCode.INTERNAL


BY_CODE: dict[ErrorCode, type[ServiceError]] = {
    cls.code: cls for cls in ServiceError.__subclasses__()
}
"""The class of each code, for the edges that rebuild an error from the wire."""
