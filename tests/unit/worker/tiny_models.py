"""Tiny random models in Hugging Face's format, and helpers that build steps by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from worker.device import Device
from worker.kv_cache import KvCacheShape
from worker.model_runner import ModelRunner
from worker.sampling_params import SamplingParams
from worker.step import CachedRequests, IntArray, NewRequest, StepInput, StepResult
from worker.worker import ModelSpec, Worker

VOCAB_SIZE = 97
EOS_ID = 2
BLOCK_SIZE = 4
SHAPE = KvCacheShape(
    num_blocks=64,
    block_size=BLOCK_SIZE,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
GREEDY = SamplingParams(temperature=0.0)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": EOS_ID,
    "bos_token_id": 1,
    # wide enough that logits differ by far more than rounding
    "initializer_range": 0.3,
}


def save_llama(path: Path, **overrides: Any) -> Any:
    """Writes a tiny Llama and returns it, in float32 and evaluation mode."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**(_SIZES | overrides)))
    model.eval()
    model.save_pretrained(path)
    return model


def save_mistral(path: Path, **overrides: Any) -> Any:
    """Writes a tiny Mistral without a sliding window and returns it."""
    torch.manual_seed(0)
    sizes = _SIZES | {"sliding_window": None, "head_dim": 8} | overrides
    model: Any = MistralForCausalLM(MistralConfig(**sizes))
    model.eval()
    model.save_pretrained(path)
    return model


def loaded_worker(path: Path, cache_dir: Path, shape: KvCacheShape = SHAPE) -> Worker:
    """A worker with the model of `path` and a cache."""
    worker = Worker(Device("cpu", has_native_bfloat16=False), cache_dir)
    worker.load_model(ModelSpec(str(path), torch.float32), lambda _loaded, _total: None)
    worker.initialize_kv_cache(shape)
    return worker


def ints(values: list[int] | range) -> IntArray:
    return np.array(values, dtype=np.int64)


def new_request(
    handle: int,
    prompt: list[int],
    *,
    blocks: list[int] | range,
    scheduled: int | None = None,
    computed: int = 0,
    output: list[int] | None = None,
    sampling: SamplingParams = GREEDY,
    traceparent: str | None = None,
) -> NewRequest:
    output = output or []
    total = len(prompt) + len(output)
    return NewRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=ints(prompt),
        output_token_ids=ints(output),
        sampling=sampling,
        block_ids=[ints(blocks)],
        num_computed_tokens=computed,
        num_scheduled_tokens=total - computed if scheduled is None else scheduled,
        traceparent=traceparent,
    )


def cached(
    *rows: tuple[int, int, int], new_blocks: dict[int, list[int]] | None = None
) -> CachedRequests:
    """Columns of (handle, computed, scheduled); `new_blocks` by handle."""
    blocks = [(new_blocks or {}).get(handle, []) for handle, _, _ in rows]
    return CachedRequests(
        handles=ints([row[0] for row in rows]),
        num_computed_tokens=ints([row[1] for row in rows]),
        num_scheduled_tokens=ints([row[2] for row in rows]),
        num_new_blocks=ints([len(ids) for ids in blocks]),
        new_block_ids=ints([block for ids in blocks for block in ids]),
    )


def step_of(
    number: int,
    new: list[NewRequest] | None = None,
    again: CachedRequests | None = None,
    **fields: Any,
) -> StepInput:
    return StepInput(number, new or [], cached() if again is None else again, **fields)


def run(runner: ModelRunner, step: StepInput) -> StepResult:
    runner.execute_model(step)
    return runner.sample_tokens()


def tokens_of(result: StepResult) -> dict[int, int]:
    """Sampled token by handle."""
    sampled = iter(result.sampled_token_ids)
    counts = zip(result.handles, result.num_sampled_tokens, strict=True)
    return {handle: next(sampled) for handle, count in counts if count}
