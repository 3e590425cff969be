"""The worker: one device, the weights and KV cache on it, and the lease of who may use them.

Weights and KV memory outlive leases. `take_lease` and `check_epoch` belong to the event loop; all
else runs on the compute thread.
"""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from worker.device import Device
from worker.kv_cache import KvCache, KvCacheShape, allocate_kv_cache
from worker.loader.model_source import open_model
from worker.loader.weights import Progress, load_into
from worker.model_config import ModelConfig
from worker.model_runner import ModelRunner
from worker.models.registry import CausalLM, build_model
from worker.sampling_params import SamplingParams
from worker.step import CachedRequests, HeldRequest, NewRequest, StepInput

# the rest is for activations, other processes and the page cache
_CPU_KV_SHARE = 3
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may use the worker."""

    engine_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to load, and how."""

    model: str
    dtype: torch.dtype
    load_format: str = "auto"
    revision: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in place."""

    spec: ModelSpec
    config: ModelConfig
    weight_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory of one token's keys and values over all layers."""
        return self.config.kv_elements_per_token * self.spec.dtype.itemsize


class Worker:
    """What the servicer drives.

    Args:
        device: where everything lives.
        cache_dir: where converted models are kept.
    """

    def __init__(self, device: Device, cache_dir: Path) -> None:
        self.worker_id = uuid.uuid4().hex
        self.device = device
        self.lease: Lease | None = None
        self.loaded: LoadedModel | None = None
        self.kv_cache: KvCache | None = None
        self._cache_dir = cache_dir
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._held: list[HeldRequest] = []
        self._is_warm = False

    def take_lease(self, engine_id: str, epoch: int) -> None:
        """Errors: FailedPreconditionError when the epoch is not over the current one."""
        current = 0 if self.lease is None else self.lease.epoch
        if epoch <= current:
            raise FailedPreconditionError(f"epoch {epoch} is not over the current one, {current}")
        self.lease = Lease(engine_id, epoch)

    def check_epoch(self, epoch: int) -> None:
        """Errors: FailedPreconditionError when the lease has another epoch."""
        if self.lease is None or self.lease.epoch != epoch:
            raise FailedPreconditionError(f"epoch {epoch} does not hold the lease of this worker")

    def load_model(self, spec: ModelSpec, progress: Progress) -> LoadedModel:
        """Loads the weights, or confirms that they are loaded.

        Errors: FailedPreconditionError when another model is; else those of `open_model`,
        `build_model` and `load_into`; ResourceExhaustedError when memory is short.
        """
        if self.loaded is not None:
            if self.loaded.spec != spec:
                raise FailedPreconditionError(f"another model is loaded: {self.loaded.spec.model}")
            return self.loaded
        source = open_model(
            spec.model,
            dtype=spec.dtype,
            load_format=spec.load_format,
            revision=spec.revision,
            seed=spec.seed,
            cache_dir=self._cache_dir,
        )
        try:
            model = build_model(source.config, spec.dtype)
            targets = model.weight_targets()
            with torch.inference_mode():
                load_into(source, targets, progress)
        except (MemoryError, RuntimeError) as error:
            # on a CPU torch has no type of its own for it
            if isinstance(error, RuntimeError) and "allocate" not in str(error).lower():
                raise
            raise ResourceExhaustedError(f"{spec.model} does not fit into memory") from error
        self._model = model
        weight_bytes = sum(target.nbytes for target in targets.values())
        self.loaded = LoadedModel(spec, source.config, weight_bytes)
        return self.loaded

    def available_kv_cache_bytes(self) -> int:
        """What the KV cache may take. Errors: FailedPreconditionError without a model."""
        self._require_model()
        used = 0 if self.kv_cache is None else self.kv_cache.num_bytes
        return max(used, self.device.available_bytes() // _CPU_KV_SHARE)

    def initialize_kv_cache(self, shape: KvCacheShape) -> int:
        """Allocates the KV cache, or confirms one of the same shape. Returns its bytes.

        Errors: FailedPreconditionError without a model, InvalidArgumentError,
        ResourceExhaustedError.
        """
        model, loaded = self._require_model()
        shape.check()
        limit = loaded.config.max_position_embeddings
        if shape.max_model_len > limit:
            raise InvalidArgumentError(
                f"max_model_len {shape.max_model_len} is over the model's {limit} positions",
                param="max_model_len",
            )
        if self.kv_cache is not None and self.kv_cache.shape == shape:
            return self.kv_cache.num_bytes
        self._drop_kv_cache()
        needed = shape.num_blocks * shape.block_size * loaded.kv_bytes_per_token
        if needed > self.device.available_bytes():
            raise ResourceExhaustedError(f"a KV cache of {needed} bytes does not fit into memory")
        backend, dtype = self.device.attention_backend(), loaded.spec.dtype
        self.kv_cache = allocate_kv_cache(loaded.config, shape, backend, dtype)
        self._runner = ModelRunner(model, loaded.config, self.kv_cache, backend, dtype)
        return self.kv_cache.num_bytes

    def warm_up(self) -> int:
        """Runs a small batch once. Returns the milliseconds it took, 0 if it was warm.

        Only the null block is written, so requests that are held stay valid.
        Errors: FailedPreconditionError without a cache.
        """
        runner = self.runner()
        if self._is_warm:
            return 0
        started = time.perf_counter()
        shape = runner.batch.shape
        length = min(_WARM_UP_TOKENS, shape.block_size, shape.max_model_len)
        prompt_len = max(1, min(length - 1, shape.max_num_batched_tokens))
        runner.execute_model(StepInput(0, [_dummy_request(prompt_len)], _no_cached()))
        runner.sample_tokens()
        if prompt_len < length:
            runner.execute_model(StepInput(1, [], _decode_of(0, prompt_len)))
            runner.sample_tokens()
        runner.reset()
        self._is_warm = True
        return round((time.perf_counter() - started) * 1e3)

    def runner(self) -> ModelRunner:
        """What runs steps. Errors: FailedPreconditionError without a model or cache."""
        self._require_model()
        if self._runner is None:
            raise FailedPreconditionError("the KV cache is not initialized")
        return self._runner

    def begin_stream(self) -> None:
        """A new step stream starts from an empty batch, and takes over the cache's contents."""
        if self._runner is not None:
            self._runner.reset()
        self._held = []

    def end_stream(self) -> None:
        """Drops the batch; what it holds in the cache stays known to the inventory."""
        if self._runner is not None:
            self._held = self._runner.reset()

    def held_requests(self) -> list[HeldRequest]:
        """Requests of the latest stream whose keys and values are still in the cache."""
        return self._held

    def _require_model(self) -> tuple[CausalLM, LoadedModel]:
        if self._model is None or self.loaded is None:
            raise FailedPreconditionError("no model is loaded")
        return self._model, self.loaded

    def _drop_kv_cache(self) -> None:
        self.kv_cache = self._runner = None
        self._held = []
        self._is_warm = False


def _dummy_request(num_tokens: int) -> NewRequest:
    return NewRequest(
        handle=0,
        request_id="warm-up",
        prompt_token_ids=np.zeros(num_tokens, dtype=np.int64),
        output_token_ids=np.empty(0, dtype=np.int64),
        sampling=SamplingParams(top_p=0.9),
        block_ids=[np.zeros(1, dtype=np.int64)],
        num_computed_tokens=0,
        num_scheduled_tokens=num_tokens,
    )


def _no_cached() -> CachedRequests:
    return CachedRequests(*(np.empty(0, dtype=np.int64) for _ in range(5)))


def _decode_of(handle: int, num_computed: int) -> CachedRequests:
    columns: list[list[int]] = [[handle], [num_computed], [1], [0], []]
    return CachedRequests(*(np.array(column, dtype=np.int64) for column in columns))
