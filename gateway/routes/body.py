"""Reads a request's body within bounds."""

import asyncio
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from gateway.errors import BodyTooLargeError, UnsupportedMediaTypeError
from gateway.schemas.body import parse_object
from services.errors import InvalidArgumentError

BODY_TIMEOUT_S: Final = 60.0
"""For the whole of a body; a slow link brings megabytes in it."""


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
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        reason = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} seconds"
        raise InvalidArgumentError(reason) from error
    except ClientDisconnect as error:
        raise InvalidArgumentError("the client left before its body was complete") from error
    return parse_object(bytes(body))
