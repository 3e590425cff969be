"""A worker without a device: speaks worker.v1 and answers from a shadow batch."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from seamline.worker.v1 import worker_pb2, worker_pb2_grpc
from services import request_errors
from services.errors import FailedPreconditionError, InternalError, ServiceError
from services.server import GrpcServer
from tests.fakes.shadow_batch import EOS, ShadowBatch, ShadowMismatchError

_Context = grpc.aio.ServicerContext[Any, Any]

POISON = 333
"""A prompt of this one token fails in its first step."""


@dataclass
class FakeModel:
    """What the fake worker claims to have."""

    vocab_size: int = 1000
    max_position_embeddings: int = 4096
    num_groups: int = 1
    bytes_per_token: int = 1024
    available_kv_cache_bytes: int = 64 * 1024 * 1024
    device: str = "cpu"
    load_error: ServiceError | None = None

    def info(self, model: str) -> worker_pb2.ModelInfo:
        """The model as the enginecore sees it."""
        group = worker_pb2.KvCacheGroup(num_layers=2, bytes_per_token=self.bytes_per_token)
        return worker_pb2.ModelInfo(
            model=model,
            architecture="FakeForCausalLM",
            dtype="float32",
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            eos_token_ids=[EOS],
            weight_bytes=1000,
            kv_cache_groups=[group] * self.num_groups,
        )


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one fake device.

    `gate` holds a step's answer back while it is clear. `on_step` is called with the step number
    and the batch after each step's deltas are applied. What goes wrong is kept in `mismatches`.
    """

    address: str
    model: FakeModel = field(default_factory=FakeModel)
    step_delay_s: float = 0.0
    on_step: Callable[[int, ShadowBatch], None] = lambda step, batch: None
    mismatches: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    epoch: int = 0
    num_steps: int = 0
    batch: ShadowBatch | None = None
    shape: worker_pb2.InitializeKvCacheRequest | None = None

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self._worker_id = uuid.uuid4().hex
        self._server = GrpcServer(self.address, services=["seamline.worker.v1.WorkerService"])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.grpc)

    async def start(self) -> None:
        """Listens."""
        await self._server.start()

    async def stop(self) -> None:
        """Dies: streams break, the batch and the cache are gone."""
        await self._server.stop(0)

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise FailedPreconditionError(f"epoch {epoch} does not hold the lease")

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: _Context
    ) -> worker_pb2.AttachResponse:
        self.calls.append("Attach")
        if request.epoch <= self.epoch or not request.engine_id:
            raise FailedPreconditionError("an epoch must be over the current one")
        self.epoch = request.epoch
        return worker_pb2.AttachResponse(worker_id=self._worker_id, device=self.model.device)

    async def LoadModel(
        self, request: worker_pb2.LoadModelRequest, context: _Context
    ) -> AsyncGenerator[worker_pb2.LoadModelResponse]:
        self.calls.append("LoadModel")
        self._check(request.epoch)
        if self.model.load_error is not None:
            raise self.model.load_error
        yield worker_pb2.LoadModelResponse(loaded_bytes=500, total_bytes=1000)
        yield worker_pb2.LoadModelResponse(
            loaded_bytes=1000, total_bytes=1000, model=self.model.info(request.model)
        )

    async def ProfileMemory(
        self, request: worker_pb2.ProfileMemoryRequest, context: _Context
    ) -> worker_pb2.ProfileMemoryResponse:
        self.calls.append("ProfileMemory")
        self._check(request.epoch)
        return worker_pb2.ProfileMemoryResponse(
            available_kv_cache_bytes=self.model.available_kv_cache_bytes
        )

    async def InitializeKvCache(
        self, request: worker_pb2.InitializeKvCacheRequest, context: _Context
    ) -> worker_pb2.InitializeKvCacheResponse:
        self.calls.append("InitializeKvCache")
        self._check(request.epoch)
        self.shape = request
        return worker_pb2.InitializeKvCacheResponse(kv_cache_bytes=1)

    async def WarmUp(
        self, request: worker_pb2.WarmUpRequest, context: _Context
    ) -> worker_pb2.WarmUpResponse:
        self.calls.append("WarmUp")
        self._check(request.epoch)
        return worker_pb2.WarmUpResponse(duration_ms=1)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: _Context
    ) -> AsyncGenerator[worker_pb2.ExecuteResponse]:
        self.calls.append("Execute")
        batch = self._new_batch()
        step = None
        async for request in request_iterator:
            self._check(request.epoch)
            if step is not None and request.step != step + 1:
                raise FailedPreconditionError(f"step {request.step} after {step}")
            step = request.step
            output = self._run(batch, request)
            await asyncio.sleep(self.step_delay_s)
            await self.gate.wait()
            self.num_steps += 1
            yield worker_pb2.ExecuteResponse(epoch=self.epoch, model_runner_output=output)

    def _new_batch(self) -> ShadowBatch:
        shape = self.shape
        if shape is None:
            raise FailedPreconditionError("no KV cache")
        self.batch = ShadowBatch(
            shape.num_blocks,
            shape.block_size,
            shape.max_num_seqs,
            shape.max_num_batched_tokens,
            self.model.vocab_size,
        )
        return self.batch

    def _run(
        self, batch: ShadowBatch, request: worker_pb2.ExecuteRequest
    ) -> worker_pb2.ModelRunnerOutput:
        try:
            sampled = batch.run(request.scheduler_output)
            self.on_step(request.step, batch)
        except AssertionError as mismatch:
            self.mismatches.append(str(mismatch))
            raise FailedPreconditionError(str(mismatch)) from mismatch
        failed = [
            handle
            for handle in sampled
            if batch.requests[handle].token_ids[:1] == [POISON]
            and batch.requests[handle].num_prompt_tokens == 1
        ]
        for handle in failed:
            sampled[handle] = []
        error = request_errors.to_proto(InternalError("the request failed on the worker"))
        return worker_pb2.ModelRunnerOutput(
            step=request.step,
            handles=list(sampled),
            num_sampled_tokens=[len(tokens) for tokens in sampled.values()],
            sampled_token_ids=[token for tokens in sampled.values() for token in tokens],
            failed_requests=[
                worker_pb2.FailedRequest(handle=handle, error=error) for handle in failed
            ],
        )


__all__ = ["POISON", "FakeModel", "FakeWorker", "ShadowMismatchError"]
