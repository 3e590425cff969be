"""The connection to one worker."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from enginecore.kv_cache_config import KVCacheConfig
from seamline.worker.v1 import worker_pb2, worker_pb2_grpc
from services.channel import from_rpc_error, open_channel
from services.errors import InternalError, UnavailableError

_ATTACH_TIMEOUT_S: Final = 10.0
"""Attach only takes a lease; a worker that cannot answer that is not there."""

_Call = grpc.aio.StreamStreamCall[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


@dataclass(slots=True, frozen=True)
class LoadOptions:
    """What the workers load and how large their steps get."""

    model: str
    dtype: str
    load_format: str
    revision: str | None
    seed: int
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    enforce_eager: bool


class WorkerLink:
    """One lease of one worker: the calls in their order, then the step stream.

    All calls raise ServiceError with the worker's message.

    Args:
        address: the worker.
        epoch: the epoch to attach with; a new lease is a new link.
    """

    def __init__(self, address: str, epoch: int) -> None:
        self.address = address
        self._epoch = epoch
        self._channel = open_channel(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._outgoing: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()
        self._call: _Call | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self, engine_id: str) -> worker_pb2.AttachResponse:
        """Takes the lease."""
        request = worker_pb2.AttachRequest(engine_id=engine_id, epoch=self._epoch)
        try:
            return await self._stub.Attach(request, timeout=_ATTACH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise UnavailableError(f"no worker answers at {self.address}") from error
            raise from_rpc_error(error) from error

    async def load_model(
        self, options: LoadOptions, on_progress: Callable[[float], None]
    ) -> worker_pb2.ModelInfo:
        """Loads the model, reporting the share that is done."""
        request = worker_pb2.LoadModelRequest(
            epoch=self._epoch,
            model=options.model,
            dtype=options.dtype,
            load_format=options.load_format,
            revision=options.revision,
            seed=options.seed,
        )
        try:
            async for progress in self._stub.LoadModel(request):
                if progress.HasField("model"):
                    on_progress(1.0)
                    return progress.model
                if progress.total_bytes:
                    on_progress(progress.loaded_bytes / progress.total_bytes)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise InternalError("the worker's load ended without a model")

    async def profile_memory(self, options: LoadOptions) -> int:
        """Bytes that the KV cache may take."""
        request = worker_pb2.ProfileMemoryRequest(
            epoch=self._epoch,
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
        )
        try:
            response = await self._stub.ProfileMemory(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response.available_kv_cache_bytes

    async def initialize(self, config: KVCacheConfig, options: LoadOptions) -> None:
        """Allocates the KV cache and warms up."""
        request = worker_pb2.InitializeKvCacheRequest(
            epoch=self._epoch,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        warm_up = worker_pb2.WarmUpRequest(epoch=self._epoch, enforce_eager=options.enforce_eager)
        try:
            await self._stub.InitializeKvCache(request)
            await self._stub.WarmUp(warm_up)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    # ---- the step stream

    def open_stream(
        self,
        on_message: Callable[[worker_pb2.ExecuteResponse], None],
        on_end: Callable[[Exception], None],
    ) -> None:
        """Begins the step stream; `on_end` is called when it ends, whatever the reason."""
        self._call = call = self._stub.Execute()
        self._tasks = [
            asyncio.create_task(self._read(call, on_message, on_end)),
            asyncio.create_task(self._write(call, on_end)),
        ]

    def send(self, message: worker_pb2.ExecuteRequest) -> None:
        """Sends a message after those before it. The engine bounds how many are under way."""
        self._outgoing.put_nowait(message)

    async def _read(
        self,
        call: _Call,
        on_message: Callable[[worker_pb2.ExecuteResponse], None],
        on_end: Callable[[Exception], None],
    ) -> None:
        try:
            async for message in call:
                on_message(message)
        except grpc.aio.AioRpcError as error:
            on_end(from_rpc_error(error))
        else:
            on_end(UnavailableError("the worker ended the step stream"))

    async def _write(self, call: _Call, on_end: Callable[[Exception], None]) -> None:
        try:
            while True:
                await call.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            on_end(error)

    def close_stream(self) -> None:
        """Ends the step stream; the worker forgets its batch."""
        if self._call is not None:
            self._call.cancel()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def close(self) -> None:
        """Ends everything."""
        self.close_stream()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
