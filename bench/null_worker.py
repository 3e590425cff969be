"""A worker that computes nothing: the whole of worker.v1 and the compute thread, without a model.

python -m bench.null_worker ADDRESS
"""

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import torch
import uvloop

from seamline.worker.v1 import worker_pb2_grpc
from services.server import GrpcServer
from worker.app import SERVICE_NAME
from worker.compute_thread import ComputeThread
from worker.device import Device
from worker.kv_cache import KvCacheShape
from worker.loader.weights import Progress
from worker.model_config import ModelConfig
from worker.model_runner import ModelRunner
from worker.servicer import WorkerServicer
from worker.step import GrammarMask, HeldRequest, StepInput, StepResult, StepTimings
from worker.worker import LoadedModel, ModelSpec, Worker

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=1_000,
    max_position_embeddings=8_192,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)
TOKEN_ID = 7


class NullRunner(ModelRunner):
    """Answers every scheduled request with the same token, at once."""

    def __init__(self) -> None:
        self._started_ns = 0
        self._step: StepInput | None = None

    def execute_model(self, step: StepInput) -> None:
        """Notes when the compute thread got the step, by the clock that both processes share."""
        self._started_ns = time.monotonic_ns()
        self._step = step

    def sample_tokens(self, mask: GrammarMask | None = None) -> StepResult:
        """One token per request."""
        step = self._step
        assert step is not None
        handles = [new.handle for new in step.new_requests]
        handles += np.asarray(step.cached.handles).tolist()
        return StepResult(
            step=step.step,
            handles=handles,
            num_sampled_tokens=[1] * len(handles),
            sampled_token_ids=[TOKEN_ID] * len(handles),
            timings=StepTimings(started_unix_ns=self._started_ns),
        )

    def reset(self) -> list[HeldRequest]:
        """Nothing is held."""
        return []


class NullWorker(Worker):
    """Loads and allocates nothing."""

    def __init__(self) -> None:
        super().__init__(Device("cpu", has_native_bfloat16=False), Path())
        self._null_runner = NullRunner()

    def load_model(self, spec: ModelSpec, progress: Progress) -> LoadedModel:
        """A model of no weights."""
        self.loaded = LoadedModel(ModelSpec(spec.model, torch.float32), CONFIG, 0)
        return self.loaded

    def available_kv_cache_bytes(self) -> int:
        """A plausible number."""
        return 2**30

    def initialize_kv_cache(self, shape: KvCacheShape) -> int:
        """No memory."""
        return 0

    def warm_up(self) -> int:
        """Nothing to warm."""
        return 0

    def runner(self) -> ModelRunner:
        """The runner that computes nothing."""
        return self._null_runner


async def serve(address: str) -> None:
    """Serves until killed."""
    server = GrpcServer(address, services=[SERVICE_NAME])
    servicer = WorkerServicer(NullWorker(), ComputeThread())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
