"""Puts an enginecore together: executor, engine, server."""

import asyncio
import logging
import uuid
from typing import Final

from prometheus_client import REGISTRY

from enginecore.admission import AdmissionLimits
from enginecore.engine import Engine
from enginecore.engine_state import EngineOptions, EngineState
from enginecore.executor import Executor, GrpcExecutor
from enginecore.kv_cache_config import CacheOptions
from enginecore.metrics import EngineCollector, register_metrics
from enginecore.scheduler_config import SchedulerConfig
from enginecore.servicer import EngineServicer
from enginecore.settings import EnginecoreSettings
from enginecore.worker_link import LoadOptions
from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.server import GrpcServer

log = logging.getLogger(__name__)

SERVICE_NAME: Final = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
_GRACE_S: Final = 1.0
"""Time for final statuses to reach the clients."""


class Enginecore:
    """A running enginecore.

    Args:
        settings: what the operator asked for.
        executor: where steps run; unset: on the workers that the settings name.
    """

    def __init__(self, settings: EnginecoreSettings, executor: Executor | None = None) -> None:
        self._shutdown_timeout_s = settings.shutdown_timeout
        self._serves_metrics = settings.metrics_port != 0
        self._server = GrpcServer(settings.listen_address, services=[SERVICE_NAME])
        engine_id = uuid.uuid4().hex
        self.executor = executor or GrpcExecutor(
            settings.worker_address, engine_id, load_options(settings)
        )
        self._state_changed = asyncio.Event()
        self.engine = Engine(
            self.executor, engine_options(settings), engine_id, self._state_changed.set
        )
        self._collector: EngineCollector | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._server.address

    async def start(self) -> None:
        """Listens, and begins to look for the workers."""
        servicer = EngineServicer(self.engine)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, self._server.grpc)
        await self._server.start()
        if self._serves_metrics:
            self._collector = register_metrics(self.engine)
        self._tasks = [
            asyncio.create_task(self.engine.run()),
            asyncio.create_task(self._publish_health()),
        ]

    async def wait(self) -> None:
        """Returns never; raises the ServiceError for which the engine cannot serve."""
        raise await asyncio.shield(self.engine.failure)

    async def stop(self) -> None:
        """Takes nothing new, waits up to the shutdown timeout for the rest, ends."""
        await self.engine.drain_until_empty(self._shutdown_timeout_s)
        await self.engine.stop()
        await self._server.stop(_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.executor.close()
        if self._collector is not None:
            REGISTRY.unregister(self._collector)

    async def _publish_health(self) -> None:
        while True:
            await self._state_changed.wait()
            self._state_changed.clear()
            await self._server.set_serving(SERVICE_NAME, self.engine.state is EngineState.READY)


async def start_enginecore(
    settings: EnginecoreSettings, executor: Executor | None = None
) -> Enginecore:
    """Starts an enginecore on the running event loop; it waits for its workers by itself.

    Takes no signals and configures no logging: several services may share the process.
    Errors: UnavailableError when the address cannot be bound.
    """
    enginecore = Enginecore(settings, executor)
    await enginecore.start()
    log.info("listening on %s", enginecore.address)
    return enginecore


def load_options(settings: EnginecoreSettings) -> LoadOptions:
    """What the workers need."""
    return LoadOptions(
        model=settings.model,
        dtype=settings.dtype,
        load_format=settings.load_format,
        revision=settings.revision,
        seed=settings.seed,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=settings.enforce_eager,
    )


def engine_options(settings: EnginecoreSettings) -> EngineOptions:
    """What the engine needs."""
    scheduler = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or 0,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        scheduling_policy=settings.scheduling_policy,
        limits=AdmissionLimits(settings.max_num_queued_reqs, settings.max_num_queued_tokens),
    )
    cache = CacheOptions(
        settings.block_size,
        settings.max_model_len,
        settings.num_gpu_blocks_override,
        settings.kv_cache_memory_bytes,
    )
    return EngineOptions(settings.model, scheduler, cache, settings.enable_prefix_caching)
