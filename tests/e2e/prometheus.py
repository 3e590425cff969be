"""What the gateway's /metrics say."""

import asyncio
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.launched_stack import LaunchedStack

IDLE_TIMEOUT_S = 30.0


def samples(stack: LaunchedStack) -> dict[str, float]:
    """Each sample's sum over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{stack.base_url}/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def gauge(stack: LaunchedStack, name: str) -> float:
    """One sample."""
    return samples(stack)[name]


async def wait_until_idle(stack: LaunchedStack) -> None:
    """Waits until no request runs or waits and no block is held."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while any(held := {name: gauge(stack, name) for name in names}.values()):
        assert time.monotonic() < deadline, f"still held: {list(held)}"
        await asyncio.sleep(0.2)
