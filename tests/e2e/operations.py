"""What an operator sees of a stack: the gateway's /metrics and the enginecore's statistics."""

import asyncio
import time

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.launched_stack import LaunchedStack
from seamline.engine.v1 import engine_pb2, engine_pb2_grpc

IDLE_TIMEOUT_S = 30.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def samples(stack: LaunchedStack) -> dict[str, float]:
    """Each sample's sum over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{stack.base_url}/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def sample(stack: LaunchedStack, name: str) -> float:
    """One sample."""
    return samples(stack)[name]


def scheduler_stats(stack: LaunchedStack) -> engine_pb2.SchedulerStats:
    """The scheduler's own count, from the enginecore."""
    with grpc.insecure_channel(stack.enginecore_address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        watch = stub.WatchScheduler(engine_pb2.WatchSchedulerRequest())
        stats = next(iter(watch)).stats
        watch.cancel()
    return stats


async def wait_until_idle(stack: LaunchedStack) -> None:
    """Waits until no request is live and every block is free, as both services tell it."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        stats = await asyncio.to_thread(scheduler_stats, stack)
        now = await asyncio.to_thread(samples, stack)
        held = {name: now[name] for name in GAUGES if now[name]}
        if not held and stats.num_free_blocks == stats.num_blocks > 0:
            return
        assert time.monotonic() < deadline, f"still held: {held}, {stats}"
        await asyncio.sleep(0.2)
