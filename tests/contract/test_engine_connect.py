"""EngineService.Connect over a Unix socket against a fake worker."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

import grpc
import pytest

from seamline.common.v1 import output_pb2
from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.channel import CLIENT_OPTIONS
from tests.fakes.engine_stack import EngineStack, core_request, engine_stack
from tests.fakes.shadow_batch import expected_tokens

PROMPT = [5, 6, 7, 8]


class Gateway:
    """The other end of a session."""

    def __init__(self, stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
        self._call = stub.Connect()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, list[engine_pb2.FinishedRequest]] = defaultdict(list)
        self.stats: list[engine_pb2.SchedulerStats] = []
        self.num_messages = 0

    async def hello(self) -> engine_pb2.Welcome:
        await self.send(hello=engine_pb2.Hello(gateway_id="test"))
        first = await self._call.read()
        assert isinstance(first, engine_pb2.ConnectResponse)
        return first.welcome

    async def send(
        self,
        hello: engine_pb2.Hello | None = None,
        add: engine_pb2.AddRequests | None = None,
        abort: engine_pb2.AbortRequests | None = None,
    ) -> None:
        await self._call.write(engine_pb2.ConnectRequest(hello=hello, add=add, abort=abort))

    async def add(
        self, handles: Iterable[int], prompt: list[int] = PROMPT, max_tokens: int = 8
    ) -> None:
        requests = [
            engine_pb2.SessionRequest(
                handle=handle, request=core_request(f"r{handle}", prompt, max_tokens)
            )
            for handle in handles
        ]
        await self.send(add=engine_pb2.AddRequests(requests=requests))

    async def abort(self, *handles: int) -> None:
        await self.send(abort=engine_pb2.AbortRequests(handles=handles))

    async def read(self) -> bool:
        """Takes one message; False at the end of the stream."""
        message = await self._call.read()
        if not isinstance(message, engine_pb2.ConnectResponse):
            return False
        outputs = message.outputs
        self.num_messages += 1
        start = 0
        assert len(set(outputs.handles)) == len(outputs.handles)
        for handle, count in zip(outputs.handles, outputs.num_new_tokens, strict=True):
            assert not self.finished[handle], "tokens after the final answer"
            self.tokens[handle] += outputs.new_token_ids[start : start + count]
            start += count
        assert start == len(outputs.new_token_ids)
        for finished in outputs.finished:
            self.finished[finished.handle].append(finished)
        if outputs.HasField("scheduler_stats"):
            self.stats.append(outputs.scheduler_stats)
        return True

    async def read_until_finished(self, *handles: int) -> None:
        async with asyncio.timeout(10):
            while not all(self.finished[handle] for handle in handles):
                assert await self.read()

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def code(self) -> grpc.StatusCode:
        return await self._call.code()

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def connected(
    stack: EngineStack, stub: "engine_pb2_grpc.EngineServiceAsyncStub | None" = None
) -> AsyncGenerator[Gateway]:
    gateway = Gateway(stub or stack.stub)
    welcome = await gateway.hello()
    assert welcome.engine_id == stack.enginecore.engine.engine_id
    assert welcome.epoch > 0
    try:
        yield gateway
    finally:
        gateway.cancel()


async def test_session_carries_many_requests() -> None:
    async with engine_stack(max_num_seqs=8) as stack, connected(stack) as gateway:
        await gateway.add(range(1, 21), max_tokens=10)
        await gateway.read_until_finished(*range(1, 21))
        await gateway.done_writing()
        while await gateway.read():
            pass
        assert await gateway.code() is grpc.StatusCode.OK
        for handle in range(1, 21):
            assert gateway.tokens[handle] == expected_tokens(PROMPT, 10)
            (finished,) = gateway.finished[handle]
            assert finished.finish_reason == output_pb2.FINISH_REASON_LENGTH


async def test_one_message_per_step() -> None:
    async with engine_stack(step_delay_s=0.01) as stack, connected(stack) as gateway:
        await gateway.add(range(1, 11), max_tokens=10)
        await gateway.read_until_finished(*range(1, 11))
        # One message per step, and perhaps one of statistics alone.
        assert gateway.num_messages <= 12


async def test_abort_is_acknowledged_with_its_blocks() -> None:
    async with engine_stack(step_delay_s=0.01) as stack, connected(stack) as gateway:
        free = stack.num_free_blocks
        await gateway.add([1, 2], prompt=[9] * 40, max_tokens=3000)
        while not (gateway.tokens[1] and gateway.tokens[2]):
            await gateway.read()
        await gateway.abort(1, 2, 77)
        await gateway.read_until_finished(1, 2)
        for handle in (1, 2):
            (finished,) = gateway.finished[handle]
            assert finished.finish_reason == output_pb2.FINISH_REASON_ABORT
            assert finished.stats.num_output_tokens == len(gateway.tokens[handle])
        # Two blocks hold the common prefix: the last holder frees them.
        freed = [gateway.finished[handle][0].num_freed_blocks for handle in (1, 2)]
        held = [-(-(39 + len(gateway.tokens[handle])) // 16) for handle in (1, 2)]
        assert held[0] - 2 <= freed[0] <= held[0] - 1
        assert held[1] <= freed[1] <= held[1] + 1
        assert stack.num_free_blocks == free
        await gateway.add([1], max_tokens=3)
        gateway.finished[1].clear()
        gateway.tokens[1].clear()
        await gateway.read_until_finished(1)
        assert gateway.tokens[1] == expected_tokens(PROMPT, 3)


async def test_abort_during_the_last_step_wins_c6() -> None:
    """C6"""
    async with engine_stack() as stack, connected(stack) as gateway:
        stack.worker.gate.clear()
        await gateway.add([1], max_tokens=1)
        await stack.wait_until(lambda: stack.worker.batch is not None and stack.num_unfinished == 1)
        await gateway.abort(1)
        await gateway.read_until_finished(1)
        assert gateway.finished[1][0].finish_reason == output_pb2.FINISH_REASON_ABORT
        assert gateway.tokens[1] == []
        stack.worker.gate.set()
        await gateway.add([2], max_tokens=2)
        await gateway.read_until_finished(2)
        assert len(gateway.finished[1]) == 1


async def test_adds_are_all_or_nothing_a16() -> None:
    """A16"""
    async with (
        engine_stack(step_delay_s=0.01, max_num_queued_reqs=10) as stack,
        connected(stack) as gateway,
    ):
        await gateway.add(range(1, 9), max_tokens=3000)
        await gateway.add([11, 12, 13])
        await gateway.read_until_finished(11, 12, 13)
        for handle in (11, 12, 13):
            error = gateway.finished[handle][0].error
            assert error.code == output_pb2.REQUEST_ERROR_CODE_RESOURCE_EXHAUSTED
            assert error.retryable
        assert stack.num_unfinished == 8
        scheduler = stack.enginecore.engine.scheduler
        assert scheduler is not None
        assert scheduler.counters.num_rejected_reqs == 1
        await gateway.add([14, 15])
        await gateway.read_until_finished(14, 15)
        assert gateway.tokens[14] == gateway.tokens[15] == expected_tokens(PROMPT, 8)


async def test_one_bad_request_refuses_its_group_and_no_other() -> None:
    async with engine_stack() as stack, connected(stack) as gateway:
        good = engine_pb2.SessionRequest(handle=1, request=core_request("good", PROMPT))
        bad = engine_pb2.SessionRequest(handle=2, request=core_request("bad", [5000]))
        await gateway.send(add=engine_pb2.AddRequests(requests=[good, bad]))
        await gateway.add([3])
        await gateway.read_until_finished(1, 2, 3)
        for handle in (1, 2):
            (finished,) = gateway.finished[handle]
            assert finished.finish_reason == output_pb2.FINISH_REASON_ERROR
            assert finished.error.code == output_pb2.REQUEST_ERROR_CODE_INVALID_ARGUMENT
            assert finished.error.param == "prompt_token_ids"
        assert gateway.tokens[3] == expected_tokens(PROMPT, 8)


@pytest.mark.parametrize(
    "message",
    [
        engine_pb2.ConnectRequest(),
        engine_pb2.ConnectRequest(hello=engine_pb2.Hello()),
        engine_pb2.ConnectRequest(add=engine_pb2.AddRequests()),
        engine_pb2.ConnectRequest(
            add=engine_pb2.AddRequests(
                requests=[engine_pb2.SessionRequest(request=core_request("a", PROMPT))]
            )
        ),
        engine_pb2.ConnectRequest(
            add=engine_pb2.AddRequests(
                requests=[
                    engine_pb2.SessionRequest(handle=3, request=core_request(name, PROMPT))
                    for name in "ab"
                ]
            )
        ),
    ],
)
async def test_malformed_message_ends_the_session(message: engine_pb2.ConnectRequest) -> None:
    async with engine_stack(step_delay_s=0.01) as stack:
        call = stack.stub.Connect()
        await call.write(engine_pb2.ConnectRequest(hello=engine_pb2.Hello(gateway_id="g")))
        await call.read()
        await call.write(message)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await stack.wait_until(lambda: stack.num_unfinished == 0)


async def test_no_hello_is_refused() -> None:
    async with engine_stack() as stack:
        call = stack.stub.Connect()
        await call.write(engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequests(handles=[1])))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_lost_session_frees_its_requests_and_no_others() -> None:
    async with engine_stack(step_delay_s=0.005) as stack, connected(stack) as survivor:
        free = stack.num_free_blocks
        async with connected(stack) as lost:
            await lost.add(range(100, 130), prompt=[3] * 50, max_tokens=3000)
            await survivor.add([1], max_tokens=60)
            while not lost.tokens[100]:
                await lost.read()
        await survivor.read_until_finished(1)
        assert survivor.tokens[1] == expected_tokens(PROMPT, 60)
        await stack.wait_until(lambda: stack.num_unfinished == 0)
        assert stack.num_free_blocks == free


async def test_slow_consumer_gets_merged_outputs_and_blocks_nobody_c8() -> None:
    """C8: a gateway that does not read for a while loses nothing and is not waited for."""
    # Without probing, the transport holds 64 KiB; 250 messages of 120 requests are more.
    options = [*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)]
    async with (
        engine_stack(max_num_seqs=128) as stack,
        grpc.aio.insecure_channel(stack.enginecore.address, options=options) as channel,
        connected(stack, engine_pb2_grpc.EngineServiceStub(channel)) as slow,
    ):
        await slow.add(range(1, 121), max_tokens=250)
        async with connected(stack) as quick:
            await quick.add([200], max_tokens=20)
            await quick.read_until_finished(200)
        await stack.wait_until(lambda: stack.num_unfinished == 0, timeout_s=60)
        await slow.read_until_finished(*range(1, 121))
        for handle in range(1, 121):
            assert slow.tokens[handle] == expected_tokens(PROMPT, 250)
            assert len(slow.finished[handle]) == 1
        assert slow.num_messages < 250


async def test_statistics_come_while_anything_runs() -> None:
    async with engine_stack(step_delay_s=0.02) as stack, connected(stack) as gateway:
        async with connected(stack) as other:
            await other.add([1, 2], max_tokens=3000)
            async with asyncio.timeout(5):
                while not gateway.stats or not gateway.stats[-1].num_running_reqs:
                    await gateway.read()
        stats = gateway.stats[-1]
        assert stats.num_running_reqs == 2
        assert 0 < stats.kv_cache_usage_ratio < 1
        assert stats.num_blocks > stats.num_free_blocks
