"""The one place where an exception becomes a gRPC status.

`ServiceError`s become the status of their code; anything else is logged and becomes INTERNAL with a
fixed message, for grpc.aio would send the exception's repr to the client.
"""

from __future__ import annotations  # the generics of grpc's stubs do not exist at run time

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from services.errors import ServiceError

log = logging.getLogger(__name__)

PARAM_METADATA_KEY = "seamline-param"
"""Trailing metadata that names the parameter at fault."""
INTERNAL_MESSAGE = "internal error"


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> None:
    trailing = ((PARAM_METADATA_KEY, error.param),) if error.param else ()
    await context.abort(grpc.StatusCode[error.code], error.message, trailing)


async def _abort_internal(context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
    log.exception("%s failed", method)
    await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)


def _wrap_unary(method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: ANN401
        try:
            return await behaviour(request, context)
        except ServiceError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001 - the boundary: nothing internal may reach the client
            await _abort_internal(context, method)

    return call


def _wrap_stream(method: str, behaviour: Callable[..., AsyncGenerator[Any]]) -> Callable[..., Any]:
    async def call(
        request: Any,  # noqa: ANN401
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[Any]:
        try:
            # closed at once when the client leaves, so that its `finally` aborts the request now
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except ServiceError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001 - the boundary: nothing internal may reach the client
            await _abort_internal(context, method)

    return call


_OURS = "/seamline."


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler of the project's own services; health and reflection keep theirs."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Returns the handler with its errors mapped."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        maker, behaviour, wrap = _parts(handler)
        return maker(  # type: ignore[no-any-return]
            wrap(method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _parts(handler: Any) -> tuple[Callable[..., Any], Any, Callable[..., Any]]:  # noqa: ANN401
    """The maker of a handler's kind, its behaviour, and the wrapper for what it returns."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream, _wrap_stream
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream, _wrap_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary, _wrap_unary
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary, _wrap_unary
