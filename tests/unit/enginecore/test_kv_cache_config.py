import re

import pytest

from enginecore.kv_cache_config import (
    CacheOptions,
    KVCacheGroupSpec,
    ModelFacts,
    WorkerFacts,
    plan_kv_cache,
)
from services.errors import InvalidArgumentError, ResourceExhaustedError

MIB = 1024 * 1024


def facts(
    device: str = "cpu", available: int = 10_000 * MIB, groups: int = 1, bytes_per_token: int = 1024
) -> WorkerFacts:
    specs = tuple(KVCacheGroupSpec(2, bytes_per_token) for _ in range(groups))
    model = ModelFacts("m", "A", "float32", 1000, 8192, frozenset({0}), 1, specs)
    return WorkerFacts(device, model, available)


@pytest.mark.parametrize(
    ("workers", "options", "num_blocks"),
    [
        (facts(), CacheOptions(), 384 * 64),
        (facts(available=100 * MIB), CacheOptions(), 100 * 64),
        (facts("cuda:0"), CacheOptions(), 10_000 * 64),
        (facts("cuda:0"), CacheOptions(kv_cache_memory_bytes=MIB), 64),
        (facts(), CacheOptions(kv_cache_memory_bytes=MIB, num_gpu_blocks_override=7), 7),
        (facts(groups=2), CacheOptions(), 384 * 32),
        (facts(), CacheOptions(block_size=32), 384 * 32),
    ],
)
def test_number_of_blocks(workers: WorkerFacts, options: CacheOptions, num_blocks: int) -> None:
    assert plan_kv_cache(workers, options).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("options", "max_model_len"),
    [
        (CacheOptions(), 8192),
        (CacheOptions(max_model_len=100), 100),
        (CacheOptions(num_gpu_blocks_override=11), 160),
        (CacheOptions(num_gpu_blocks_override=11, max_model_len=160), 160),
    ],
)
def test_context_length(options: CacheOptions, max_model_len: int) -> None:
    assert plan_kv_cache(facts(), options).max_model_len == max_model_len


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (CacheOptions(max_model_len=8193), "8193.*8192"),
        (CacheOptions(max_model_len=161, num_gpu_blocks_override=11), "161.*160"),
    ],
)
def test_context_length_that_does_not_fit(options: CacheOptions, lengths: str) -> None:
    with pytest.raises(InvalidArgumentError) as info:
        plan_kv_cache(facts(), options)
    assert re.search(lengths, info.value.message)
    assert info.value.param == "max_model_len"


def test_no_room_for_a_block() -> None:
    with pytest.raises(ResourceExhaustedError, match="0 blocks"):
        plan_kv_cache(facts(available=100), CacheOptions())
