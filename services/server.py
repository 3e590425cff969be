"""A gRPC server with what every service has: error mapping, health, reflection, size bounds."""

import asyncio
import contextlib
import os
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.channel import SERVER_OPTIONS
from services.errors import UnavailableError
from services.interceptor import ErrorInterceptor

_UNIX = "unix:"


class GrpcServer:
    """One listening gRPC server.

    Register servicers on `grpc` before `start`. Health of each service begins as NOT_SERVING; ""
    (the whole process) is SERVING from `start` on.

    Args:
        address: `host:port` (port 0: any free one) or `unix:/path`.
        services: full names of the services, for health and reflection.
    """

    def __init__(self, address: str, *, services: Sequence[str]) -> None:
        self.address = address
        self.grpc = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)  # type: ignore[no-untyped-call]
        reflection.enable_server_reflection(  # type: ignore[no-untyped-call]
            [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc
        )
        self._services = services

    async def set_serving(self, service: str, serving: bool) -> None:
        """Publishes a service's health to checkers and watchers."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def start(self) -> None:
        """Binds and serves. Errors: UnavailableError when the address cannot be bound."""
        for service in self._services:
            await self.set_serving(service, False)
        await self.set_serving("", True)
        await self._clear_stale_socket()
        try:
            port = self.grpc.add_insecure_port(self.address)
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {self.address}") from error
        if not self.address.startswith(_UNIX):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self.grpc.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for running ones, then ends them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)

    async def _clear_stale_socket(self) -> None:
        """Removes a killed predecessor's socket file; refuses to take a live server's.

        Without the check a second process would silently steal the first one's address.
        """
        if not self.address.startswith(_UNIX):
            return
        path = self.address.removeprefix(_UNIX)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            _, writer = await asyncio.open_unix_connection(path)
            writer.close()
            raise UnavailableError(f"another process listens on {self.address}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
