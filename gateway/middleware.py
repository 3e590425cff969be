"""What every HTTP request passes: its id, its span, its key, and the last net under its handler."""

import logging
import re
import uuid
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import Status, StatusCode
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import PROBE_PATHS, ApiKeys
from gateway.core import GatewayCore
from gateway.errors import error_body, error_headers, http_error
from gateway.openai_output import dump
from gateway.schemas.generation import REQUEST_ID_PATTERN
from gateway.tracing import RequestTrace, mark_error, start_request
from services.errors import InternalError, ServiceError

log = logging.getLogger(__name__)

GENERATION_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
_REQUEST_ID: Final = re.compile(REQUEST_ID_PATTERN)


@dataclass(slots=True)
class HttpCall:
    """What belongs to one HTTP request.

    Attributes:
        request_id: the client's X-Request-Id, or drawn.
        status: of the response, once it is begun.
    """

    request_id: str
    trace: RequestTrace
    status: int | None = None


def call_of(request: Request) -> HttpCall:
    """The call that a handler serves."""
    call: HttpCall = request.scope["state"]["call"]
    return call


def error_response(error: ServiceError, trace_id: str | None = None) -> Response:
    """An error in OpenAI's shape."""
    return Response(
        dump(error_body(error, trace_id)),
        status_code=http_error(error).status,
        headers=error_headers(error),
        media_type="application/json",
    )


class CallMiddleware:
    """Wraps the application.

    Args:
        app: the application.
        core: counts what passes.
        keys: what opens routes that are not for probes.
    """

    def __init__(self, app: ASGIApp, core: GatewayCore, keys: ApiKeys) -> None:
        self._app = app
        self._core = core
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection scope."""
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = _begin(scope, headers)
        counts = scope["path"] in GENERATION_PATHS
        self._core.num_in_flight += counts
        try:
            await self._guarded(scope, receive, _sender(call, send), call, headers)
        finally:
            self._core.num_in_flight -= counts
            self._end(scope, call)

    async def _guarded(
        self, scope: Scope, receive: Receive, send: Send, call: HttpCall, headers: Headers
    ) -> None:
        try:
            self._keys.check(headers.get("authorization"))
            await self._app(scope, receive, send)
        except ServiceError as error:
            mark_error(call.trace.span, error)
            await error_response(error)(scope, receive, send)
        except Exception:  # the last net: the client gets an answer, and the log the cause
            log.exception("a request failed", extra={"request_id": call.request_id})
            failure = InternalError("a request failed")
            mark_error(call.trace.span, failure)
            if call.status is None:
                response = error_response(failure, call.trace.trace_id)
                await response(scope, receive, send)

    def _end(self, scope: Scope, call: HttpCall) -> None:
        route = _route(scope)
        span = call.trace.span
        span.update_name(f"{scope['method']} {route}" if route else scope["method"])
        if route:
            span.set_attribute("http.route", route)
        if call.status is not None:
            span.set_attribute("http.response.status_code", call.status)
            if call.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            self._core.metrics.observe_response(route or "unknown", call.status)
        span.end()


def _begin(scope: Scope, headers: Headers) -> HttpCall:
    given = headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
    known = scope["path"] in GENERATION_PATHS
    name = f"{scope['method']} {scope['path']}" if known else scope["method"]
    trace = start_request(name, headers.get("traceparent"), headers.get("tracestate"))
    trace.span.set_attribute("http.request.method", scope["method"])
    trace.span.set_attribute("gen_ai.request.id", request_id)
    call = HttpCall(request_id, trace)
    scope.setdefault("state", {})["call"] = call
    return call


def _sender(call: HttpCall, send: Send) -> Send:
    """Notes the status and adds the headers that every response has."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = call.request_id
            if call.trace.trace_id is not None:
                headers["x-trace-id"] = call.trace.trace_id
        await send(message)

    return wrapped


def _route(scope: Scope) -> str | None:
    path: str | None = getattr(scope.get("route"), "path", None)
    return path
