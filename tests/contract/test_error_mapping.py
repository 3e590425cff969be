"""Every RPC kind maps errors the same way (STYLE's error table)."""

from __future__ import annotations  # the generics of grpc's stubs do not exist at run time

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.channel import from_rpc_error, open_channel
from services.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from services.interceptor import INTERNAL_MESSAGE
from services.server import GrpcServer

SERVICE = "seamline.engine.v1.EngineService"


class Failing(engine_pb2_grpc.EngineServiceServicer):
    """Raises what it is told to, in each of the RPC kinds it has."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.GetEngineInfoResponse:
        raise self.error

    async def Generate(
        self, request: engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        yield engine_pb2.GenerateResponse(new_token_ids=[1])
        raise self.error

    async def Connect(
        self,
        request_iterator: AsyncIterator[engine_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[engine_pb2.ConnectResponse]:
        raise self.error
        yield engine_pb2.ConnectResponse()


async def serve(error: Exception, address: str) -> GrpcServer:
    server = GrpcServer(address, services=[SERVICE])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(Failing(error), server.grpc)  # type: ignore[abstract]
    await server.start()
    return server


async def call_all_kinds(address: str) -> list[grpc.aio.AioRpcError]:
    errors = []
    async with open_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        errors.append(unary.value)
        for call in (stub.Generate(engine_pb2.GenerateRequest()), stub.Connect(iter(()))):
            with pytest.raises(grpc.aio.AioRpcError) as stream:
                async for _ in call:
                    pass
            errors.append(stream.value)
    return errors


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("top_p must be over 0", param="top_p"),
        ResourceExhaustedError("queue full"),
        UnavailableError("starting"),
    ],
)
async def test_service_errors_keep_code_message_and_param(
    error: ServiceError, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/s"
    server = await serve(error, address)
    try:
        for received in await call_all_kinds(address):
            assert received.code().name == error.code
            back = from_rpc_error(received)
            assert type(back) is type(error)
            assert (back.message, back.param) == (error.message, error.param)
    finally:
        await server.stop()


async def test_anything_else_is_internal_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/s"
    server = await serve(ValueError("the secret path"), address)
    try:
        for received in await call_all_kinds(address):
            assert received.code() is grpc.StatusCode.INTERNAL
            assert received.details() == INTERNAL_MESSAGE
    finally:
        await server.stop()
    assert "the secret path" in caplog.text


async def test_health_starts_not_serving_and_follows(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    server = await serve(ValueError(), address)
    status = health_pb2.HealthCheckResponse.ServingStatus
    try:
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            assert (await stub.Check(request)).status == status.NOT_SERVING
            await server.set_serving(SERVICE, True)
            assert (await stub.Check(request)).status == status.SERVING
    finally:
        await server.stop()


async def test_a_live_servers_socket_is_not_stolen_and_a_dead_ones_is_reused(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/s"
    first = await serve(ValueError(), address)
    with pytest.raises(UnavailableError, match="another process listens"):
        await serve(ValueError(), address)
    await first.stop()
    (tmp_path / "s").touch()
    second = await serve(ValueError(), address)
    await second.stop()
