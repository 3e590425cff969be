"""Reads a request's body within bounds."""

from typing import Any

from starlette.requests import ClientDisconnect, Request

from gateway.errors import BodyTooLargeError, UnsupportedMediaTypeError
from gateway.schemas.body import parse_object
from services.errors import InvalidArgumentError


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a request's body.

    Errors: UnsupportedMediaTypeError, BodyTooLargeError (before the whole was read),
    InvalidArgumentError.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaTypeError("the content-type must be application/json")
    too_large = BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise InvalidArgumentError("the client left before its body was complete") from error
    return parse_object(bytes(body))
