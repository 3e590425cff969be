"""EngineService.Generate over a Unix socket against a fake worker."""

import asyncio

import grpc
import pytest

from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.engine.v1 import engine_pb2
from tests.fakes.engine_stack import collect, core_request, engine_stack
from tests.fakes.shadow_batch import expected_tokens
from tests.fakes.worker import POISON

PROMPT = [5, 6, 7, 8]


async def test_streams_tokens_and_one_final_answer() -> None:
    async with engine_stack() as stack:
        tokens, finished = await collect(stack.generate("a", PROMPT, max_tokens=20))
        assert tokens == expected_tokens(PROMPT, 20)
        assert finished.finish_reason == output_pb2.FINISH_REASON_LENGTH
        assert not finished.HasField("error")
        stats = finished.stats
        assert (stats.num_prompt_tokens, stats.num_output_tokens) == (4, 20)
        times = [
            stats.queued_unix_ns,
            stats.scheduled_unix_ns,
            stats.first_token_unix_ns,
            stats.last_token_unix_ns,
            stats.finished_unix_ns,
        ]
        assert times == sorted(times)
        assert stats.queued_unix_ns > 0
        assert finished.num_freed_blocks == 2


async def test_stop_token_ends_and_is_named() -> None:
    async with engine_stack() as stack:
        stop = expected_tokens(PROMPT, 3)[2]
        params = sampling_pb2.SamplingParams(max_tokens=20, stop_token_ids=[stop])
        call = stack.generate("a", PROMPT, None, sampling_params=params)
        tokens, finished = await collect(call)
        assert tokens == expected_tokens(PROMPT, 3)
        assert finished.finish_reason == output_pb2.FINISH_REASON_STOP
        assert finished.stop_token_id == stop


async def test_without_max_tokens_the_context_ends_it() -> None:
    async with engine_stack(max_model_len=30) as stack:
        tokens, finished = await collect(stack.generate("a", PROMPT, max_tokens=None))
        assert len(tokens) == 26
        assert finished.finish_reason == output_pb2.FINISH_REASON_LENGTH


async def test_resumed_request_sends_only_new_tokens() -> None:
    async with engine_stack() as stack:
        known = expected_tokens(PROMPT, 5)
        call = stack.generate("a", PROMPT, max_tokens=8, output_token_ids=known)
        tokens, finished = await collect(call)
        assert tokens == expected_tokens(PROMPT, 8)[5:]
        assert finished.stats.num_output_tokens == 8


async def test_concurrent_requests_do_not_touch_each_other() -> None:
    async with engine_stack(max_num_seqs=8, max_num_batched_tokens=64) as stack:
        prompts = [[10 + i] * (1 + 7 * i) for i in range(24)]
        calls = [stack.generate(f"r{i}", prompt, 12) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(collect(call) for call in calls))
        assert [tokens for tokens, _ in results] == [expected_tokens(p, 12) for p in prompts]
        assert stack.num_unfinished == 0


@pytest.mark.parametrize("when", ["waiting", "running"])
async def test_cancel_frees_blocks_and_the_id_c5(when: str) -> None:
    """C5"""
    async with engine_stack(step_delay_s=0.01, max_num_seqs=1) as stack:
        free = stack.num_free_blocks
        first = stack.generate("first", PROMPT, 2000)
        await anext(aiter(first))
        victim = first
        if when == "waiting":
            victim = stack.generate("second", PROMPT, 2000)
            await stack.wait_until(lambda: stack.num_unfinished == 2)
        victim.cancel()
        await stack.wait_until(lambda: stack.num_unfinished == (when == "waiting"))
        first.cancel()
        await stack.wait_until(lambda: stack.num_unfinished == 0)
        assert stack.num_free_blocks == free
        tokens, _ = await collect(stack.generate("first", PROMPT, 4))
        assert tokens == expected_tokens(PROMPT, 4)


async def test_two_hundred_cancels_leave_nothing_c5() -> None:
    """C5"""
    async with engine_stack(step_delay_s=0.002, max_num_seqs=16) as stack:
        free = stack.num_free_blocks
        calls = [stack.generate(f"r{i}", [i % 900 + 1] * 30, 3000) for i in range(200)]
        await stack.wait_until(lambda: stack.num_unfinished == 200)
        for call in calls:
            call.cancel()
        tokens, _ = await asyncio.wait_for(collect(stack.generate("new", PROMPT, 4)), 5)
        assert tokens == expected_tokens(PROMPT, 4)
        await stack.wait_until(lambda: stack.num_unfinished == 0)
        assert stack.num_free_blocks == free


@pytest.mark.parametrize("by", ["call", "field"])
async def test_deadline_ends_the_request(by: str) -> None:
    async with engine_stack(step_delay_s=0.01) as stack:
        free = stack.num_free_blocks
        if by == "call":
            call = stack.generate("a", PROMPT, 3000, timeout=0.2)
        else:
            call = stack.generate("a", PROMPT, 3000, timeout_ms=200)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await collect(call)
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.wait_until(lambda: stack.num_unfinished == 0)
        assert stack.num_free_blocks == free


async def test_expired_waiting_request_never_runs() -> None:
    async with engine_stack(step_delay_s=0.01, max_num_seqs=1) as stack:
        seen: list[str] = []
        stack.worker.on_step = lambda step, batch: seen.extend(
            request.request_id for request in batch.requests.values()
        )
        first = stack.generate("first", PROMPT, 3000)
        await anext(aiter(first))
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await collect(stack.generate("second", PROMPT, 5, timeout_ms=50))
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        first.cancel()
        await stack.wait_until(lambda: stack.num_unfinished == 0)
        assert set(seen) == {"first"}


async def test_poison_request_fails_alone_c2() -> None:
    """C2: prompt [333] ends with an error and zero tokens; the others and the next go on."""
    async with engine_stack(step_delay_s=0.005) as stack:
        other = asyncio.create_task(collect(stack.generate("other", PROMPT, 30)))
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await collect(stack.generate("poison", [POISON], 5))
        assert info.value.code() is grpc.StatusCode.INTERNAL
        assert (await other)[0] == expected_tokens(PROMPT, 30)
        tokens, _ = await collect(stack.generate("next", PROMPT, 5))
        assert tokens == expected_tokens(PROMPT, 5)


Params = sampling_pb2.SamplingParams
Structured = sampling_pb2.StructuredOutput
NAN = float("nan")

REFUSED = [
    (core_request("", PROMPT), "request_id"),
    (core_request("x" * 257, PROMPT), "request_id"),
    (core_request("a", []), "prompt_token_ids"),
    (core_request("a", [1000]), "prompt_token_ids"),
    (core_request("a", [1] * 100), "prompt_token_ids"),
    (core_request("a", [1] * 5000), "prompt_token_ids"),
    (core_request("a", PROMPT, output_token_ids=[1000]), "output_token_ids"),
    (core_request("a", PROMPT, max_tokens=0), "max_tokens"),
    (core_request("a", PROMPT, sampling_params=Params(min_tokens=9)), "min_tokens"),
    (core_request("a", PROMPT, sampling_params=Params(temperature=2.1)), "temperature"),
    (core_request("a", PROMPT, sampling_params=Params(temperature=-0.1)), "temperature"),
    (core_request("a", PROMPT, sampling_params=Params(temperature=NAN)), "temperature"),
    (core_request("a", PROMPT, sampling_params=Params(top_p=0)), "top_p"),
    (core_request("a", PROMPT, sampling_params=Params(top_p=1.1)), "top_p"),
    (core_request("a", PROMPT, sampling_params=Params(min_p=1.1)), "min_p"),
    (core_request("a", PROMPT, sampling_params=Params(presence_penalty=3)), "presence_penalty"),
    (core_request("a", PROMPT, sampling_params=Params(frequency_penalty=-3)), "frequency_penalty"),
    (core_request("a", PROMPT, sampling_params=Params(repetition_penalty=0)), "repetition_penalty"),
    (core_request("a", PROMPT, sampling_params=Params(logit_bias={1000: 1})), "logit_bias"),
    (core_request("a", PROMPT, sampling_params=Params(logit_bias={1: 101})), "logit_bias"),
    (core_request("a", PROMPT, sampling_params=Params(stop_token_ids=[1000])), "stop_token_ids"),
    (core_request("a", PROMPT, sampling_params=Params(logprobs=21)), "logprobs"),
    (core_request("a", PROMPT, sampling_params=Params(prompt_logprobs=21)), "prompt_logprobs"),
    (core_request("a", PROMPT, cache_salt="x" * 2000), "cache_salt"),
]


async def test_bad_requests_are_refused_by_name() -> None:
    async with engine_stack(max_model_len=100) as stack:
        for request, field in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await collect(stack.stub.Generate(engine_pb2.GenerateRequest(request=request)))
            assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert field in str(info.value.details())
        assert stack.num_unfinished == 0
        tokens, _ = await collect(stack.generate("a", PROMPT, 5))
        assert tokens == expected_tokens(PROMPT, 5)


async def test_what_is_not_built_is_said_so() -> None:
    async with engine_stack() as stack:
        requests = [
            core_request("a", PROMPT, lora_name="adapter"),
            core_request(
                "a",
                PROMPT,
                sampling_params=Params(structured_output=Structured(json_object=True)),
            ),
        ]
        for request in requests:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await collect(stack.stub.Generate(engine_pb2.GenerateRequest(request=request)))
            assert info.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_live_id_is_refused_and_the_queue_is_bounded() -> None:
    async with engine_stack(step_delay_s=0.01, max_num_queued_reqs=2) as stack:
        first = stack.generate("first", PROMPT, 3000)
        await anext(aiter(first))
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await collect(stack.generate("first", PROMPT, 5))
        assert info.value.code() is grpc.StatusCode.ALREADY_EXISTS
        second = stack.generate("second", PROMPT, 3000)
        await anext(aiter(second))
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await collect(stack.generate("third", PROMPT, 5))
        assert info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        second.cancel()


async def test_unseeded_requests_get_different_seeds() -> None:
    async with engine_stack() as stack:
        seeds: dict[str, int] = {}

        def note(step: int, batch: object) -> None:
            held = stack.worker.batch
            assert held is not None
            seeds.update({r.request_id: r.seed for r in held.requests.values()})

        stack.worker.on_step = note
        await collect(stack.generate("a", PROMPT, 2))
        await collect(stack.generate("b", PROMPT, 2))
        seeded = Params(max_tokens=2, seed=-7)
        await collect(stack.generate("c", PROMPT, None, sampling_params=seeded))
        assert seeds["a"] != seeds["b"]
        assert seeds["c"] == -7


@pytest.mark.parametrize("by", ["metadata", "field"])
async def test_trace_context_reaches_the_worker(by: str) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    traceparent = f"00-{trace_id}-b7ad6b7169203331-00"
    async with engine_stack() as stack:
        seen: list[str] = []
        stack.worker.on_step = lambda step, batch: seen.extend(
            request.traceparent for request in batch.requests.values()
        )
        request = core_request("a", PROMPT, 2)
        metadata = [("traceparent", traceparent)] if by == "metadata" else []
        if by == "field":
            request.traceparent = traceparent
        message = engine_pb2.GenerateRequest(request=request)
        await collect(stack.stub.Generate(message, metadata=metadata))
        assert seen
        assert all(trace_id in parent for parent in seen)
