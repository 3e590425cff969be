"""The gateway: its parts put together, and its two servers (HTTP and gRPC) started and stopped."""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import ApiKeys
from gateway.chat_template import ChatTemplate
from gateway.core import GatewayCore, ServedModels
from gateway.engine_client import EngineClient
from gateway.errors import MethodNotAllowedError, RouteNotFoundError
from gateway.generation import TextGenerator
from gateway.grpc_engine_client import GrpcEngineClient
from gateway.http_protocol import BoundedHttpProtocol
from gateway.metrics import GatewayMetrics
from gateway.middleware import CallMiddleware, call_of, error_response
from gateway.prompt_encoder import PromptEncoder
from gateway.routes.generation import add_generation_routes
from gateway.routes.operations import add_model_routes, add_probe_routes, add_tokenizer_routes
from gateway.servicer import SERVICE_NAME, GatewayServicer
from gateway.settings import GatewaySettings
from gateway.tokenizer_config import TokenizerConfig, read_template
from gateway.tokenizer_source import load_tokenizer
from gateway.tracing import mark_error
from seamline.gateway.v1 import gateway_pb2_grpc
from services.errors import InvalidArgumentError, NotFoundError, ServiceError, UnavailableError
from services.server import GrpcServer

log = logging.getLogger(__name__)

_HEALTH_INTERVAL_S: Final = 0.5
_KEEP_ALIVE_S: Final = 75
"""Longer than balancers and SDK pools keep connections, so that they never use a closed one."""
_LAST_WORDS_S: Final = 2
"""After the shutdown timeout: time for the errors of what was cut off to reach the clients."""


def create_app(core: GatewayCore, keys: ApiKeys) -> FastAPI:
    """The HTTP application."""
    # the framework's own spans would double ours
    telemetry: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    app = FastAPI(
        title="Seamline", openapi_url=None, docs_url=None, redoc_url=None, telemetry=telemetry
    )
    add_generation_routes(app, core)
    add_model_routes(app, core)
    add_probe_routes(app, core)
    add_tokenizer_routes(app, core)
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(CallMiddleware, core=core, keys=keys)
    return app


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    call = call_of(request)
    mark_error(call.trace.span, error)
    return error_response(error, call.trace.trace_id)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        response = error_response(MethodNotAllowedError(f"{where}: the method is not allowed"))
        response.headers.update(error.headers or {})
        return response
    if error.status_code == 404:
        return error_response(RouteNotFoundError(f"{where}: no such route"))
    return error_response(InvalidArgumentError(str(error.detail)))


class _HttpServer(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayHandle:
    """A started gateway; made by `start_gateway`."""

    def __init__(
        self,
        core: GatewayCore,
        engine: GrpcEngineClient,
        http: _HttpServer,
        listener: socket.socket,
        grpc_server: GrpcServer,
        shutdown_timeout_s: float,
    ) -> None:
        self.core = core
        self._shutdown_timeout_s = shutdown_timeout_s
        self._engine = engine
        self._http = http
        self._grpc = grpc_server
        host, port = listener.getsockname()[:2]
        self.port: int = port
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._serving = asyncio.create_task(http.serve(sockets=[listener]))
        self._publishing = asyncio.create_task(self._publish_health())

    @property
    def grpc_address(self) -> str:
        """Where gateway.v1 listens."""
        return self._grpc.address

    async def wait(self) -> None:
        """Returns when the HTTP server ends by itself."""
        await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """Refuses new requests, lets running ones end within the timeout, then ends them.

        What still runs then gets an error that its client sees, before the servers cut it off.
        """
        self._publishing.cancel()
        self._http.should_exit = True
        servers = asyncio.gather(
            self._grpc.stop(self._shutdown_timeout_s + _LAST_WORDS_S), self._serving
        )
        await asyncio.wait({servers}, timeout=self._shutdown_timeout_s)
        await self._engine.close()
        await servers

    async def _publish_health(self) -> None:
        while True:
            await self._grpc.set_serving(SERVICE_NAME, self.core.engine.availability.ready)
            await asyncio.sleep(_HEALTH_INTERVAL_S)


async def start_gateway(settings: GatewaySettings) -> GatewayHandle:
    """Starts both servers and returns; requests are served once the engine is there.

    Errors: ServiceError saying in one line what is missing: the model's or the template's file, or
    an address that is in use.
    """
    listener = _bind(settings.host, settings.port)
    try:
        source = settings.tokenizer or settings.model
        loaded = await asyncio.to_thread(load_tokenizer, source, settings.cache_dir)
        template = _chat_template(settings.chat_template, loaded.config)
        engine = GrpcEngineClient(
            settings.enginecore_address, settings.engine_unavailable_timeout_s
        )
        encoder = PromptEncoder(loaded.tokenizer, template, lambda: _max_model_len(engine))
        core = build_core(settings, engine, encoder)
        keys = ApiKeys(settings.api_key)
        grpc_server = GrpcServer(settings.listen_address, services=[SERVICE_NAME])
        servicer = GatewayServicer(core, keys)
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, grpc_server.grpc)
        await grpc_server.start()
    except BaseException:
        listener.close()
        raise
    engine.start()
    server = _http_server(create_app(core, keys), settings)
    handle = GatewayHandle(core, engine, server, listener, grpc_server, settings.shutdown_timeout)
    log.info("the gateway listens on %s and %s", handle.base_url, handle.grpc_address)
    return handle


def _max_model_len(engine: EngineClient) -> int | None:
    return None if engine.info is None else engine.info.max_model_len


def build_core(
    settings: GatewaySettings, engine: EngineClient, encoder: PromptEncoder
) -> GatewayCore:
    """The parts that both servers share."""
    models = ServedModels.of(settings.served_model_name, settings.model)
    metrics = GatewayMetrics(models.names[0])
    return GatewayCore(
        models=models,
        root=settings.model,
        engine=engine,
        encoder=encoder,
        generator=TextGenerator(engine, encoder.tokenizer, metrics, settings.max_choices),
        metrics=metrics,
        max_request_bytes=settings.max_request_bytes,
    )


def _chat_template(given: str | None, config: TokenizerConfig) -> ChatTemplate | None:
    source = config.chat_template
    if given is not None:
        path = Path(given).expanduser()
        if "{" in given:
            source = given
        elif path.is_file():
            source = read_template(path)
        else:
            raise NotFoundError(f"no such chat template: {given}")
    return ChatTemplate(source, config.special_tokens) if source else None


def _bind(host: str, port: int) -> socket.socket:
    """Listens at once, so that a port in use is an error of the start and port 0 is known."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _http_server(app: Any, settings: GatewaySettings) -> _HttpServer:  # noqa: ANN401 - ASGI
    config = uvicorn.Config(
        app,
        log_level=settings.uvicorn_log_level,
        log_config=None,  # the process configures logging
        access_log=False,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout) + _LAST_WORDS_S,
    )
    return _HttpServer(config)
