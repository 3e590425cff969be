"""An enginecore's states: starting, serving, recovering, draining, failed."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from enginecore.app import SERVICE_NAME
from enginecore.engine_state import EngineState
from seamline.common.v1 import output_pb2
from seamline.engine.v1 import engine_pb2
from services.errors import InternalError, NotFoundError, ServiceError
from tests.fakes.engine_stack import EngineStack, collect, core_request, engine_stack
from tests.fakes.shadow_batch import expected_tokens
from tests.fakes.worker import FakeModel

PROMPT = [5, 6, 7, 8]
SERVING = health_pb2.HealthCheckResponse.ServingStatus.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.ServingStatus.NOT_SERVING


async def health(stack: EngineStack) -> int:
    stub = health_pb2_grpc.HealthStub(stack.channel)  # type: ignore[no-untyped-call]
    response = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    return int(response.status)


async def info(stack: EngineStack) -> engine_pb2.GetEngineInfoResponse:
    return await stack.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())


async def test_starts_in_the_contracts_order_and_tells_its_facts() -> None:
    async with engine_stack(num_gpu_blocks_override=101, max_model_len=500) as stack:
        order = ["Attach", "LoadModel", "ProfileMemory", "InitializeKvCache", "WarmUp"]
        assert stack.worker.calls[:5] == order
        facts = await info(stack)
        assert facts.state == engine_pb2.ENGINE_STATE_READY
        assert facts.engine_id == stack.enginecore.engine.engine_id
        assert (facts.num_blocks, facts.block_size, facts.max_model_len) == (100, 16, 500)
        assert (facts.vocab_size, list(facts.eos_token_ids)) == (1000, [0])
        assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (64, 2048)
        assert (facts.model, facts.dtype, facts.load_progress_ratio) == ("fake", "float32", 1.0)
        shape = stack.worker.shape
        assert shape is not None
        assert (shape.num_blocks, shape.max_model_len, shape.max_num_seqs) == (101, 500, 64)
        assert await health(stack) == SERVING


async def test_waits_for_its_worker_and_refuses_until_then() -> None:
    async with engine_stack(start_worker=False, wait_ready=False) as stack:
        await stack.wait_until(
            lambda: "no worker answers" in stack.enginecore.engine.status_message
        )
        assert (await info(stack)).state == engine_pb2.ENGINE_STATE_STARTING
        assert await health(stack) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stack.generate("a", PROMPT))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        call = stack.stub.Connect()
        await call.write(engine_pb2.ConnectRequest(hello=engine_pb2.Hello(gateway_id="g")))
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await stack.worker.start()
        await stack.wait_until(lambda: stack.enginecore.engine.state is EngineState.READY)
        tokens, _ = await collect(stack.generate("a", PROMPT, 5))
        assert tokens == expected_tokens(PROMPT, 5)
        assert await health(stack) == SERVING


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (FakeModel(load_error=NotFoundError("no such file: weights.gguf")), {}, "weights.gguf"),
        (FakeModel(load_error=InternalError("internal error")), {}, "internal error"),
        (FakeModel(), {"max_model_len": 5000}, "max_model_len is 5000.*4096"),
        (FakeModel(), {"max_model_len": 300, "num_gpu_blocks_override": 10}, "300.*144"),
        (FakeModel(), {"kv_cache_memory_bytes": 1000}, "0 blocks"),
        (FakeModel(), {"enable_chunked_prefill": False}, "max_num_batched_tokens"),
    ],
)
async def test_start_that_cannot_succeed_is_failed_with_its_cause(
    model: FakeModel, settings: dict[str, Any], message: str
) -> None:
    async with engine_stack(model=model, wait_ready=False, **settings) as stack:
        with pytest.raises(ServiceError, match=message):
            await asyncio.wait_for(stack.enginecore.wait(), 5)
        facts = await info(stack)
        assert facts.state == engine_pb2.ENGINE_STATE_FAILED
        assert await health(stack) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stack.generate("a", PROMPT))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("down_s", [0.0, 0.3])
async def test_worker_killed_mid_run_costs_a_pause_only(down_s: float) -> None:
    """Law 1: the same tokens as undisturbed, for running and waiting requests alike."""
    async with engine_stack(step_delay_s=0.005, max_num_seqs=4) as stack:
        free = stack.num_free_blocks
        prompts = [[10 + i] * (3 + 9 * i) for i in range(8)]
        results = [
            asyncio.create_task(collect(stack.generate(f"r{i}", prompt, 60)))
            for i, prompt in enumerate(prompts)
        ]
        await stack.wait_until(lambda: stack.worker.num_steps > 20)
        old, first_epoch = stack.worker, stack.worker.epoch
        await old.stop()
        await stack.wait_until(lambda: stack.enginecore.engine.state is EngineState.RECOVERING)
        assert await health(stack) == NOT_SERVING
        late = asyncio.create_task(collect(stack.generate("late", PROMPT, 5)))
        await asyncio.sleep(down_s)
        await stack.replace_worker()
        for prompt, result in zip(prompts, results, strict=True):
            tokens, finished = await asyncio.wait_for(result, 20)
            assert tokens == expected_tokens(prompt, 60)
            assert finished.finish_reason == output_pb2.FINISH_REASON_LENGTH
        assert (await late)[0] == expected_tokens(PROMPT, 5)
        assert stack.worker.epoch > first_epoch
        assert old.mismatches == []
        assert stack.num_free_blocks == free
        assert await health(stack) == SERVING


async def test_a_lease_from_a_clock_that_is_ahead_is_taken_back() -> None:
    """Its epoch is leapt over; waiting would last as long as the clocks are apart."""
    async with engine_stack(step_delay_s=0.005) as stack:
        result = asyncio.create_task(collect(stack.generate("a", PROMPT, 60)))
        await stack.wait_until(lambda: stack.worker.num_steps > 5)
        ahead = stack.worker.epoch = time.time_ns() + 300 * 1_000_000_000
        tokens, _ = await asyncio.wait_for(result, 20)
        assert tokens == expected_tokens(PROMPT, 60)
        assert stack.worker.epoch > ahead


async def test_idle_worker_loss_is_noticed_and_the_prefix_cache_forgotten() -> None:
    async with engine_stack() as stack:
        prompt = [9] * 100
        await collect(stack.generate("a", prompt, 3))
        await stack.worker.stop()
        await stack.wait_until(lambda: stack.enginecore.engine.state is EngineState.RECOVERING)
        await stack.replace_worker()
        tokens, finished = await collect(stack.generate("b", prompt, 3))
        assert tokens == expected_tokens(prompt, 3)
        assert finished.stats.num_cached_tokens == 0
        _, finished = await collect(stack.generate("c", prompt, 3))
        assert finished.stats.num_cached_tokens == 96


async def test_requests_are_answered_while_the_worker_is_away() -> None:
    async with engine_stack(step_delay_s=0.005) as stack:
        running = stack.generate("running", PROMPT, 3000)
        await anext(aiter(running))
        await stack.worker.stop()
        await stack.wait_until(lambda: stack.enginecore.engine.state is EngineState.RECOVERING)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stack.generate("expires", PROMPT, timeout_ms=50))
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        watch = stack.stub.WatchRequests(engine_pb2.WatchRequestsRequest())
        (view,) = (await anext(aiter(watch))).requests
        assert (view.request_id, view.waiting_for) == ("running", "the worker")
        assert view.state == engine_pb2.REQUEST_STATE_PREEMPTED
        watch.cancel()
        running.cancel()
        await stack.wait_until(lambda: stack.num_unfinished == 0)


async def test_worker_that_comes_back_with_another_model_is_final() -> None:
    async with engine_stack(step_delay_s=0.005) as stack:
        call = stack.generate("a", PROMPT, 3000)
        await anext(aiter(call))
        await stack.worker.stop()
        stack.worker.model = FakeModel(vocab_size=2000)
        await stack.replace_worker()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await info(stack)).state == engine_pb2.ENGINE_STATE_FAILED


async def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async with engine_stack(step_delay_s=0.005) as stack:
        running = asyncio.create_task(collect(stack.generate("a", PROMPT, 40)))
        await stack.wait_until(lambda: stack.num_unfinished == 1)
        drain = asyncio.ensure_future(stack.stub.Drain(engine_pb2.DrainRequest()))
        await stack.wait_until(lambda: stack.enginecore.engine.state is EngineState.DRAINING)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stack.generate("b", PROMPT))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await health(stack) == NOT_SERVING
        assert (await drain).num_aborted == 0
        assert (await running)[0] == expected_tokens(PROMPT, 40)


async def test_drain_aborts_after_its_timeout() -> None:
    async with engine_stack(step_delay_s=0.01) as stack:
        running = asyncio.create_task(collect(stack.generate("a", PROMPT, 3000)))
        await stack.wait_until(lambda: stack.num_unfinished == 1)
        drained = await stack.stub.Drain(engine_pb2.DrainRequest(timeout_ms=50))
        assert drained.num_aborted == 1
        _, finished = await running
        assert finished.finish_reason == output_pb2.FINISH_REASON_ABORT


async def test_stop_ends_streams_as_unavailable() -> None:
    async with engine_stack(step_delay_s=0.01) as stack:
        call = stack.generate("a", PROMPT, 3000)
        await anext(aiter(call))
        stopping = asyncio.create_task(stack.enginecore.engine.stop())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(call)
        await stopping
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_reset_prefix_cache_needs_an_idle_pool_b6() -> None:
    """B6"""
    async with engine_stack(step_delay_s=0.01) as stack:
        prompt = [9] * 100
        call = stack.generate("a", prompt, 3000)
        await anext(aiter(call))
        reset = engine_pb2.ResetPrefixCacheRequest()
        assert not (await stack.stub.ResetPrefixCache(reset)).reset
        call.cancel()
        await stack.wait_until(lambda: stack.num_unfinished == 0)
        _, finished = await collect(stack.generate("b", prompt, 2))
        assert finished.stats.num_cached_tokens == 96
        assert (await stack.stub.ResetPrefixCache(reset)).reset
        _, finished = await collect(stack.generate("c", prompt, 2))
        assert finished.stats.num_cached_tokens == 0


async def test_watches_tell_why_nothing_moves() -> None:
    async with engine_stack(step_delay_s=0.01, max_num_seqs=1) as stack:
        first = stack.generate("first", PROMPT, 3000)
        await anext(aiter(first))
        others = [stack.generate(name, PROMPT, 5) for name in ("second", "third")]
        await stack.wait_until(lambda: stack.num_unfinished == 3)
        await asyncio.sleep(0.05)
        watch = stack.stub.WatchRequests(engine_pb2.WatchRequestsRequest(interval_ms=10))
        snapshot = await anext(aiter(watch))
        running, second, third = snapshot.requests
        assert (running.request_id, running.waiting_for) == ("first", "")
        assert running.state == engine_pb2.REQUEST_STATE_RUNNING
        assert running.num_blocks == 1
        assert snapshot.step - 1 <= running.last_progress_step <= snapshot.step + 1
        assert second.waiting_for == "a slot (max_num_seqs)"
        assert third.waiting_for == "the requests before it"
        scheduler = stack.stub.WatchScheduler(engine_pb2.WatchSchedulerRequest(interval_ms=10))
        state = await anext(aiter(scheduler))
        assert (state.stats.num_running_reqs, state.stats.num_waiting_reqs) == (1, 2)
        for call in (first, *others):
            call.cancel()
        watch.cancel()
        scheduler.cancel()


@pytest.mark.parametrize("interval_ms", [9, 60_001])
async def test_watch_interval_is_bounded(interval_ms: int) -> None:
    async with engine_stack() as stack:
        watch = stack.stub.WatchRequests(engine_pb2.WatchRequestsRequest(interval_ms=interval_ms))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(aiter(watch))
        assert error.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_generate_message_without_request_is_refused() -> None:
    async with engine_stack() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(stack.stub.Generate(engine_pb2.GenerateRequest()))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert core_request("a", PROMPT).request_id == "a"
