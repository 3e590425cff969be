"""`ServiceError` ↔ `common.v1.RequestError`: the error of one request inside a stream."""

from seamline.common.v1 import output_pb2
from services.errors import BY_CODE, ErrorCode, InternalError, ServiceError

_CODES = {
    ErrorCode.INVALID_ARGUMENT: output_pb2.REQUEST_ERROR_CODE_INVALID_ARGUMENT,
    ErrorCode.DEADLINE_EXCEEDED: output_pb2.REQUEST_ERROR_CODE_DEADLINE_EXCEEDED,
    ErrorCode.RESOURCE_EXHAUSTED: output_pb2.REQUEST_ERROR_CODE_RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE: output_pb2.REQUEST_ERROR_CODE_UNAVAILABLE,
    ErrorCode.UNIMPLEMENTED: output_pb2.REQUEST_ERROR_CODE_UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: output_pb2.REQUEST_ERROR_CODE_ALREADY_EXISTS,
    ErrorCode.INTERNAL: output_pb2.REQUEST_ERROR_CODE_INTERNAL,
    # The remaining kinds concern calls, not requests; inside a stream they can only be bad input.
    ErrorCode.OUT_OF_RANGE: output_pb2.REQUEST_ERROR_CODE_INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: output_pb2.REQUEST_ERROR_CODE_INVALID_ARGUMENT,
}
_CLASSES = {wire: BY_CODE[code] for code, wire in reversed(_CODES.items())}


def to_proto(error: ServiceError) -> output_pb2.RequestError:
    """The wire form of an error."""
    return output_pb2.RequestError(
        code=_CODES.get(error.code, output_pb2.REQUEST_ERROR_CODE_INTERNAL),
        message=error.message,
        retryable=error.retryable,
        param=error.param,
    )


def from_proto(error: output_pb2.RequestError) -> ServiceError:
    """The error that a peer reported; an unknown code counts as internal."""
    cls = _CLASSES.get(error.code, InternalError)
    return cls(error.message, param=error.param if error.HasField("param") else None)
