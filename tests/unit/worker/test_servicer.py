"""worker.v1 over a real Unix socket, on the tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.worker.v1 import worker_pb2, worker_pb2_grpc
from services.channel import open_channel
from tests.unit.worker.tiny_models import EOS_ID, VOCAB_SIZE
from worker.app import SERVICE_NAME, start_worker
from worker.settings import WorkerSettings

PROMPT = [5, 17, 3, 88, 41]
GREEDY = sampling_pb2.SamplingParams(temperature=0.0, seed=1)
Stream = grpc.aio.StreamStreamCall[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


@dataclass
class Client:
    """A stub, and the model's directory."""

    stub: worker_pb2_grpc.WorkerServiceAsyncStub
    channel: grpc.aio.Channel
    model: Path
    streams: list[Stream] = field(default_factory=list)

    async def bring_up(self, epoch: int = 1) -> worker_pb2.ModelInfo:
        """Everything before Execute."""
        stub = self.stub
        await stub.Attach(worker_pb2.AttachRequest(engine_id="engine", epoch=epoch))
        messages = [message async for message in stub.LoadModel(self.load_request(epoch))]
        await stub.ProfileMemory(worker_pb2.ProfileMemoryRequest(epoch=epoch))
        await stub.InitializeKvCache(cache_request(epoch))
        await stub.WarmUp(worker_pb2.WarmUpRequest(epoch=epoch))
        return messages[-1].model

    def load_request(self, epoch: int = 1, **fields: Any) -> worker_pb2.LoadModelRequest:
        return worker_pb2.LoadModelRequest(
            epoch=epoch, **({"model": str(self.model), "dtype": "float32"} | fields)
        )

    def execute(self) -> Stream:
        stream = self.stub.Execute()
        self.streams.append(stream)
        return stream


def cache_request(epoch: int = 1, num_blocks: int = 32) -> worker_pb2.InitializeKvCacheRequest:
    return worker_pb2.InitializeKvCacheRequest(
        epoch=epoch,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )


def scheduler_output(**fields: Any) -> worker_pb2.SchedulerOutput:
    return worker_pb2.SchedulerOutput(**fields)


def new_req(
    handle: int,
    prompt: list[int] = PROMPT,
    blocks: range = range(1, 5),
    sampling: sampling_pb2.SamplingParams = GREEDY,
) -> worker_pb2.NewRequestData:
    return worker_pb2.NewRequestData(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_token_ids=prompt,
        sampling_params=sampling,
        block_ids=[worker_pb2.BlockIds(ids=blocks)],
        num_scheduled_tokens=len(prompt),
    )


def again(*rows: tuple[int, int]) -> worker_pb2.CachedRequestData:
    """Decodes of (handle, computed)."""
    return worker_pb2.CachedRequestData(
        handles=[handle for handle, _ in rows],
        num_computed_tokens=[computed for _, computed in rows],
        num_scheduled_tokens=[1 for _ in rows],
        num_new_blocks=[0 for _ in rows],
    )


def request(
    step: int, payload: worker_pb2.SchedulerOutput | worker_pb2.GrammarOutput, epoch: int = 1
) -> worker_pb2.ExecuteRequest:
    if isinstance(payload, worker_pb2.GrammarOutput):
        return worker_pb2.ExecuteRequest(epoch=epoch, step=step, grammar_output=payload)
    return worker_pb2.ExecuteRequest(epoch=epoch, step=step, scheduler_output=payload)


async def read(stream: Stream) -> worker_pb2.ModelRunnerOutput:
    response = await stream.read()
    assert isinstance(response, worker_pb2.ExecuteResponse), "the stream ended"
    return response.model_runner_output


@asynccontextmanager
async def fails_with(code: grpc.StatusCode, text: str) -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() == code
    assert text in (caught.value.details() or "")


@pytest.fixture
async def client(tiny_llama: tuple[Path, Any], tmp_path: Path) -> AsyncIterator[Client]:
    settings = WorkerSettings.model_validate(
        {
            "listen_address": f"unix:{tmp_path}/w.sock",
            "num_threads": 1,
            "cache_dir": tmp_path / "cache",
        }
    )
    running = await start_worker(settings)
    channel = open_channel(running.address)
    client = Client(worker_pb2_grpc.WorkerServiceStub(channel), channel, tiny_llama[0])
    yield client
    for stream in client.streams:
        stream.cancel()
    await channel.close()
    await running.stop()


async def test_it_is_healthy_as_soon_as_it_can_be_attached(client: Client) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)  # type: ignore[no-untyped-call]
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_lifecycle_and_its_confirmations(client: Client) -> None:
    stub = client.stub
    attached = await stub.Attach(worker_pb2.AttachRequest(engine_id="a", epoch=1))
    assert (attached.device, attached.HasField("model"), attached.num_blocks) == ("cpu", False, 0)
    messages = [message async for message in stub.LoadModel(client.load_request())]
    info = messages[-1].model
    assert [m.HasField("model") for m in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].loaded_bytes == messages[-1].total_bytes == info.weight_bytes
    assert (info.architecture, info.dtype) == ("LlamaForCausalLM", "float32")
    assert (info.vocab_size, info.max_position_embeddings) == (VOCAB_SIZE, 64)
    assert list(info.eos_token_ids) == [EOS_ID]
    # 2 layers, keys and values, 2 heads of 4, float32
    assert [(g.num_layers, g.bytes_per_token) for g in info.kv_cache_groups] == [(2, 128)]
    memory = await stub.ProfileMemory(worker_pb2.ProfileMemoryRequest(epoch=1))
    assert memory.available_kv_cache_bytes > 2**20
    assert (await stub.InitializeKvCache(cache_request())).kv_cache_bytes == 32 * 4 * 128
    assert (await stub.InitializeKvCache(cache_request())).kv_cache_bytes == 32 * 4 * 128
    await stub.WarmUp(worker_pb2.WarmUpRequest(epoch=1))

    attached = await stub.Attach(worker_pb2.AttachRequest(engine_id="b", epoch=2))
    assert (attached.model, attached.num_blocks) == (info, 32)
    messages = [message async for message in stub.LoadModel(client.load_request(epoch=2))]
    assert messages[-1].model == info
    assert (await stub.WarmUp(worker_pb2.WarmUpRequest(epoch=2))).duration_ms == 0


async def test_two_callers_join_one_load(client: Client) -> None:
    await client.stub.Attach(worker_pb2.AttachRequest(engine_id="a", epoch=1))

    async def load() -> worker_pb2.LoadModelResponse:
        return [message async for message in client.stub.LoadModel(client.load_request())][-1]

    first, second = await asyncio.gather(load(), load())
    assert first.model == second.model
    async with fails_with(grpc.StatusCode.FAILED_PRECONDITION, "another model"):
        _ = [m async for m in client.stub.LoadModel(client.load_request(dtype="bfloat16"))]


async def test_calls_out_of_order_are_refused(client: Client) -> None:
    stub = client.stub
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    async with fails_with(precondition, "epoch 1"):
        _ = [message async for message in stub.LoadModel(client.load_request())]
    await stub.Attach(worker_pb2.AttachRequest(engine_id="a", epoch=5))
    async with fails_with(precondition, "not over the current one"):
        await stub.Attach(worker_pb2.AttachRequest(engine_id="b", epoch=5))
    async with fails_with(precondition, "no model"):
        await stub.ProfileMemory(worker_pb2.ProfileMemoryRequest(epoch=5))
    async with fails_with(precondition, "no model"):
        await stub.InitializeKvCache(cache_request(epoch=5))
    _ = [message async for message in stub.LoadModel(client.load_request(epoch=5))]
    async with fails_with(precondition, "KV cache"):
        await stub.WarmUp(worker_pb2.WarmUpRequest(epoch=5))
    async with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "num_blocks"):
        await stub.InitializeKvCache(cache_request(epoch=5, num_blocks=0))
    stream = client.execute()
    await stream.write(request(1, scheduler_output(), epoch=5))
    async with fails_with(precondition, "KV cache"):
        await stream.read()


@pytest.mark.parametrize(
    ("break_it", "code", "text"),
    [
        (
            lambda d: (d / "model.safetensors").write_bytes(b"x" * 100),
            "INVALID",
            "model.safetensors",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "NOT_FOUND", "model.safetensors"),
        (lambda d: (d / "config.json").write_text("{"), "INVALID", "config.json"),
        (lambda d: (d / "config.json").unlink(), "NOT_FOUND", "config.json"),
    ],
    ids=["corrupt weights", "no weights", "corrupt config", "no config"],
)
async def test_bad_model_files_are_named(
    client: Client, tmp_path: Path, break_it: Callable[[Path], object], code: str, text: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in client.model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    break_it(broken)
    await client.stub.Attach(worker_pb2.AttachRequest(engine_id="a", epoch=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [m async for m in client.stub.LoadModel(client.load_request(model=str(broken)))]
    assert caught.value.code().name.startswith(code)
    assert text in (caught.value.details() or "")
    # a failed load is not in the way of a good one
    assert [m async for m in client.stub.LoadModel(client.load_request())][-1].HasField("model")


async def test_steps_in_order_with_deltas(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    await stream.write(request(7, scheduler_output(scheduled_new_reqs=[new_req(1)])))
    # the next step is on the wire before the last one's result is back
    await stream.write(request(8, scheduler_output(scheduled_cached_reqs=again((1, 5)))))
    await stream.write(
        request(
            9,
            scheduler_output(
                scheduled_new_reqs=[new_req(2, blocks=range(10, 14))],
                scheduled_cached_reqs=again((1, 6)),
            ),
        )
    )
    outputs = [await read(stream) for _ in range(3)]
    assert [output.step for output in outputs] == [7, 8, 9]
    assert list(outputs[2].handles) == [2, 1]
    assert list(outputs[2].num_sampled_tokens) == [1, 1]
    # the same prompt, greedily: the same first token
    assert outputs[2].sampled_token_ids[0] == outputs[0].sampled_token_ids[0]
    timings = outputs[0].timings
    assert min(timings.started_unix_ns, timings.queue_ns, timings.forward_ns) > 0
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_sampling_waits_for_the_grammar_of_its_step(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    output = scheduler_output(
        scheduled_new_reqs=[new_req(1), new_req(2, blocks=range(10, 14))],
        has_structured_output_requests=True,
    )
    await stream.write(request(1, output))
    reader = asyncio.create_task(read(stream))
    await asyncio.wait([reader], timeout=0.2)
    assert not reader.done()
    allowed = np.zeros(4, dtype="<u4")
    allowed[66 // 32] = 1 << (66 % 32)
    bitmask = worker_pb2.GrammarOutput(handles=[2], bitmask=allowed.tobytes())
    await stream.write(request(1, bitmask))
    tokens = list((await reader).sampled_token_ids)
    assert tokens[1] == 66
    assert tokens[0] != 66


async def test_a_mask_that_nobody_waits_for_ends_the_stream(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    await stream.write(request(1, worker_pb2.GrammarOutput(handles=[1], bitmask=bytes(16))))
    async with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "grammar_output"):
        await stream.read()


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (request(3, scheduler_output()), "expected step 2"),
        (request(1, scheduler_output()), "expected step 2"),
        (request(2, scheduler_output(), epoch=9), "epoch 9"),
        (request(2, scheduler_output(finished_handles=[77])), "handle 77"),
        (request(2, scheduler_output(scheduled_cached_reqs=again((77, 3)))), "handle 77"),
    ],
    ids=["gap", "repeat", "epoch", "finished", "cached"],
)
async def test_a_message_out_of_step_ends_the_stream(
    client: Client, second: worker_pb2.ExecuteRequest, text: str
) -> None:
    await client.bring_up()
    stream = client.execute()
    await stream.write(request(1, scheduler_output(scheduled_new_reqs=[new_req(1)])))
    await read(stream)
    await stream.write(second)
    async with fails_with(grpc.StatusCode.FAILED_PRECONDITION, text):
        await stream.read()
    # a new stream may start at any step, from an empty batch
    fresh = client.execute()
    await fresh.write(request(100, scheduler_output(scheduled_new_reqs=[new_req(1)])))
    assert (await read(fresh)).step == 100


async def test_columns_that_do_not_fit_together_are_an_invalid_argument(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    columns = worker_pb2.CachedRequestData(handles=[1, 2], num_computed_tokens=[1])
    await stream.write(request(1, scheduler_output(scheduled_cached_reqs=columns)))
    async with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "columns"):
        await stream.read()


async def test_a_newer_lease_fences_the_older_stream(client: Client) -> None:
    await client.bring_up()
    old = client.execute()
    await old.write(request(1, scheduler_output(scheduled_new_reqs=[new_req(1)])))
    await read(old)
    attached = await client.stub.Attach(worker_pb2.AttachRequest(engine_id="b", epoch=2))
    held = attached.held_requests
    assert [(h.request_id, h.num_computed_tokens) for h in held] == [("request-1", 5)]
    assert [list(blocks.ids) for blocks in held[0].block_ids] == [[1, 2, 3, 4]]
    async with fails_with(grpc.StatusCode.FAILED_PRECONDITION, "fenced"):
        await old.read()
    stale = client.execute()
    await stale.write(request(2, scheduler_output(), epoch=1))
    async with fails_with(grpc.StatusCode.FAILED_PRECONDITION, "epoch 1"):
        await stale.read()
    new = client.execute()
    await new.write(request(1, scheduler_output(scheduled_new_reqs=[new_req(1)]), epoch=2))
    assert (await read(new)).num_sampled_tokens == [1]


async def test_held_keys_and_values_serve_the_next_stream(client: Client) -> None:
    """Recovery: an adopted request computes only what is missing, and samples the same token."""
    await client.bring_up()
    stream = client.execute()
    await stream.write(request(1, scheduler_output(scheduled_new_reqs=[new_req(1)])))
    first = (await read(stream)).sampled_token_ids[0]
    await client.bring_up(epoch=2)  # the warm-up must not touch the blocks
    adopted = new_req(9)
    adopted.num_computed_tokens, adopted.num_scheduled_tokens = 4, 1
    stream = client.execute()
    await stream.write(request(1, scheduler_output(scheduled_new_reqs=[adopted]), epoch=2))
    assert (await read(stream)).sampled_token_ids == [first]


async def test_cancelling_drops_the_batch(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    waits = scheduler_output(scheduled_new_reqs=[new_req(1)], has_structured_output_requests=True)
    await stream.write(request(1, waits))
    await asyncio.sleep(0.1)
    stream.cancel()  # while the compute thread waits for the grammar
    fresh = client.execute()
    await fresh.write(request(1, scheduler_output(scheduled_new_reqs=[new_req(1)])))
    assert (await asyncio.wait_for(read(fresh), 5)).num_sampled_tokens == [1]


async def test_a_failed_request_leaves_the_others_alone(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    new = [new_req(1, prompt=[1, VOCAB_SIZE + 5]), new_req(2, blocks=range(10, 14))]
    await stream.write(request(1, scheduler_output(scheduled_new_reqs=new)))
    output = await read(stream)
    assert list(output.num_sampled_tokens) == [0, 1]
    (failed,) = output.failed_requests
    assert failed.handle == 1
    assert failed.error.code == output_pb2.REQUEST_ERROR_CODE_INVALID_ARGUMENT
    assert "vocabulary" in failed.error.message


async def test_logprobs_are_columns(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    sampling = sampling_pb2.SamplingParams(temperature=0.0, logprobs=2)
    new = [new_req(1), new_req(2, blocks=range(10, 14), sampling=sampling)]
    await stream.write(request(1, scheduler_output(scheduled_new_reqs=new)))
    output = await read(stream)
    assert list(output.logprobs_handles) == [2]
    assert list(output.logprobs.num_candidates) == [3]
    assert output.logprobs.token_ids[0] == output.sampled_token_ids[1]
    assert list(output.logprobs.ranks) == [1, 1, 2]


async def test_too_many_steps_ahead_are_refused(client: Client) -> None:
    await client.bring_up()
    stream = client.execute()
    for step in range(1, 12):
        waits = scheduler_output(has_structured_output_requests=True)
        await stream.write(request(step, waits))
    async with fails_with(grpc.StatusCode.RESOURCE_EXHAUSTED, "under way"):
        await stream.read()
