"""The enginecore's settings."""

from typing import Literal

from pydantic import Field

from services.settings import Addresses, ServiceSettings


class EnginecoreSettings(ServiceSettings):
    """What `python -m enginecore` takes; the names are vLLM EngineArgs' where it has one."""

    listen_address: str = Field(
        "unix:/tmp/seamline/enginecore.sock",
        description="Where engine.v1 listens: host:port or unix:/path",
    )
    worker_address: Addresses = Field(
        ("unix:/tmp/seamline/worker.sock",),
        min_length=1,
        description="Where the workers listen: one address, or one per shard of the model",
    )
    model: str = Field(
        description="The model that the workers load: a GGUF file, a directory or a hub id"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="The dtype of the weights; auto: the device's best for this model"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: by the model's files; dummy: random weights, for benchmarks"
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id")
    seed: int = Field(0, ge=0, description="The seed of dummy weights")
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest sequence in tokens, prompt and output together; unset: the model's "
        "length or what the KV cache holds, whichever is less",
    )
    max_num_seqs: int = Field(
        64, ge=1, description="Most requests in one step; 64 suits a CPU, a GPU takes more"
    )
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Most tokens in one step, prefill and decode together"
    )
    block_size: int = Field(16, ge=1, description="Tokens per KV cache block")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the device's memory to use; ignored on a CPU"
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of the KV cache; unset: what is left on a GPU, 384 MiB on a CPU",
    )
    num_gpu_blocks_override: int | None = Field(
        None, ge=2, description="Blocks of the KV cache, the null block included; over all else"
    )
    enable_prefix_caching: bool = Field(
        True, description="Share the KV cache between requests that begin alike"
    )
    enable_chunked_prefill: bool = Field(
        True, description="Split prompts that do not fit the rest of a step"
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Most prompt tokens of one request in a step others share; 0: no bound"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="Who runs next: first come, or lowest priority value"
    )
    enforce_eager: bool = Field(False, description="Run without captured graphs")
    max_num_queued_reqs: int | None = Field(
        None, ge=1, description="Most unfinished requests; more are refused at once"
    )
    max_num_queued_tokens: int | None = Field(
        None, ge=1, description="Most prompt tokens of unfinished requests; more are refused"
    )
    shutdown_timeout: float = Field(
        0.0, ge=0, description="Seconds that a stop waits for running requests"
    )
