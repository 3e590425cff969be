"""worker.v1.WorkerService: check, call, map, reply. Torch runs on the compute thread only."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from seamline.worker.v1 import worker_pb2, worker_pb2_grpc
from services.errors import FailedPreconditionError, InvalidArgumentError, ServiceError
from worker import wire
from worker.compute_thread import ComputeThread
from worker.execute_session import ExecuteSession
from worker.model_load import ModelLoad
from worker.worker import ModelSpec, Worker

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The service over one worker. Behaviour, order and errors: see worker.proto."""

    def __init__(self, worker: Worker, compute: ComputeThread) -> None:
        self._worker = worker
        self._compute = compute
        self._load: ModelLoad | None = None
        self._session: ExecuteSession | None = None

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: Context
    ) -> worker_pb2.AttachResponse:
        """Grants the lease, fences the older holder, and tells the inventory."""
        worker = self._worker
        worker.take_lease(request.engine_id, request.epoch)
        self._end_session(f"fenced by epoch {request.epoch}")
        # behind the step under way, so that what it wrote is counted
        held = await self._compute.call(worker.held_requests)
        loaded, cache = worker.loaded, worker.kv_cache
        return worker_pb2.AttachResponse(
            worker_id=worker.worker_id,
            device=worker.device.name,
            model=None if loaded is None else wire.model_to_proto(loaded),
            num_blocks=0 if cache is None else cache.shape.num_blocks,
            held_requests=[wire.held_to_proto(request) for request in held],
        )

    async def LoadModel(
        self, request: worker_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """Starts or joins a load and follows it to its end."""
        self._worker.check_epoch(request.epoch)
        load = self._load_of(
            ModelSpec(
                model=request.model,
                dtype=self._worker.device.resolve_dtype(request.dtype),
                load_format=request.load_format or "auto",
                revision=request.revision if request.HasField("revision") else None,
                seed=request.seed,
            )
        )
        async for progress in load.updates():
            yield worker_pb2.LoadModelResponse(
                loaded_bytes=progress.loaded_bytes, total_bytes=progress.total_bytes
            )
        loaded = await load.result()
        yield worker_pb2.LoadModelResponse(
            loaded_bytes=loaded.weight_bytes,
            total_bytes=loaded.weight_bytes,
            model=wire.model_to_proto(loaded),
        )

    async def ProfileMemory(
        self, request: worker_pb2.ProfileMemoryRequest, context: Context
    ) -> worker_pb2.ProfileMemoryResponse:
        """Tells the memory left; a CPU's needs no peak-sized forward to know."""
        self._worker.check_epoch(request.epoch)
        available = await self._compute.call(self._worker.available_kv_cache_bytes)
        return worker_pb2.ProfileMemoryResponse(available_kv_cache_bytes=available)

    async def InitializeKvCache(
        self, request: worker_pb2.InitializeKvCacheRequest, context: Context
    ) -> worker_pb2.InitializeKvCacheResponse:
        """Allocates the cache, or confirms it."""
        self._worker.check_epoch(request.epoch)
        shape = wire.shape_from_proto(request)
        num_bytes = await self._compute.call(lambda: self._worker.initialize_kv_cache(shape))
        return worker_pb2.InitializeKvCacheResponse(kv_cache_bytes=num_bytes)

    async def WarmUp(
        self, request: worker_pb2.WarmUpRequest, context: Context
    ) -> worker_pb2.WarmUpResponse:
        """Runs dummy batches, unless that was done."""
        self._worker.check_epoch(request.epoch)
        duration_ms = await self._compute.call(self._worker.warm_up)
        return worker_pb2.WarmUpResponse(duration_ms=duration_ms)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: Context
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """Runs a step stream."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        session = self._open_session(first)
        reader = asyncio.create_task(self._read(session, first, request_iterator))
        try:
            async for result in session.results():
                yield wire.result_to_proto(session.epoch, result)
        finally:
            reader.cancel()
            session.close()

    def _load_of(self, spec: ModelSpec) -> ModelLoad:
        """The load that is under way, or a new one; one of another model is in the way."""
        if self._load is not None and self._load.is_running:
            if self._load.spec != spec:
                raise FailedPreconditionError(f"{self._load.spec.model} is being loaded")
            return self._load
        self._load = ModelLoad(spec, self._worker, self._compute)
        return self._load

    def _open_session(self, first: worker_pb2.ExecuteRequest) -> ExecuteSession:
        self._worker.check_epoch(first.epoch)
        self._worker.runner()
        self._end_session("replaced by a newer stream")
        self._session = ExecuteSession(first.epoch, self._worker, self._compute)
        return self._session

    def _end_session(self, reason: str) -> None:
        if self._session is not None:
            self._session.fail(FailedPreconditionError(reason))
            self._session = None

    async def _read(
        self,
        session: ExecuteSession,
        first: worker_pb2.ExecuteRequest,
        requests: AsyncIterator[worker_pb2.ExecuteRequest],
    ) -> None:
        """Takes in the stream's messages; an error in one ends the stream."""
        try:
            self._accept(session, first)
            async for request in requests:
                self._accept(session, request)
        except ServiceError as error:
            session.fail(error)
        else:
            session.finish()

    def _accept(self, session: ExecuteSession, request: worker_pb2.ExecuteRequest) -> None:
        self._worker.check_epoch(request.epoch)
        kind = request.WhichOneof("payload")
        if kind == "scheduler_output":
            received_ns = time.perf_counter_ns()
            session.submit_step(
                wire.step_from_proto(request.step, request.scheduler_output, received_ns)
            )
        elif kind == "grammar_output":
            session.submit_grammar(request.step, wire.grammar_from_proto(request.grammar_output))
        else:
            raise InvalidArgumentError("an ExecuteRequest has no payload")
