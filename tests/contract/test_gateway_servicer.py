"""gateway.v1 through real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.gateway.v1 import gateway_pb2
from tests.fakes.engine import text_script
from tests.fakes.gateway import MODEL, FakeStack, running_stack, until
from tests.fakes.tokenizer import EOS_ID, NUM_CONTROL, byte_ids


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FakeStack]:
    async with running_stack(tmp_path) as running:
        yield running


def _input(**more: Any) -> gateway_pb2.GenerateInput:
    return gateway_pb2.GenerateInput(**{"model": MODEL, "text": "hi", **more})


def _params(**given: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**given)


async def _generate(stack: FakeStack, **more: Any) -> gateway_pb2.GenerateResponse:
    return await stack.stub.Generate(gateway_pb2.GenerateRequest(input=_input(**more)))


async def _status(stack: FakeStack, **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _generate(stack, **more)
    return caught.value.code(), caught.value.details() or ""


async def test_generate(stack: FakeStack) -> None:
    stack.engine.script = text_script("héllo")
    answer = await _generate(stack, sampling_params=_params(max_tokens=50), request_id="r-1")
    choice = answer.choices[0]
    assert answer.request_id == "r-1"
    assert choice.text == "héllo"
    assert list(choice.token_ids) == [*byte_ids("héllo"), EOS_ID]
    assert choice.finish_reason == output_pb2.FINISH_REASON_STOP
    assert not choice.HasField("stop_reason")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 7)
    assert answer.usage.cached_tokens == 1


async def test_the_three_kinds_of_prompt(stack: FakeStack) -> None:
    await _generate(stack)
    await _generate(stack, text=None, token_ids=gateway_pb2.TokenIds(ids=byte_ids("hi")))
    message = gateway_pb2.ChatMessage(role="user", content="hi<|im_end|>")
    conversation = gateway_pb2.Conversation(messages=[message])
    await _generate(stack, text=None, conversation=conversation)
    text, ids, chat = (list(request.prompt_token_ids) for request in stack.engine.added)
    assert text == ids == byte_ids("hi")
    user, assistant = byte_ids("user\nhi<|im_end|>"), byte_ids("assistant\n")
    assert chat == [1, *user, 2, *byte_ids("\n"), 1, *assistant]
    tokens = await stack.stub.Tokenize(gateway_pb2.TokenizeRequest(conversation=conversation))
    assert list(tokens.token_ids) == chat
    assert tokens.max_model_len == 512


async def test_stream(stack: FakeStack) -> None:
    stack.engine.script = text_script("né STOP", ends=False)
    request = gateway_pb2.GenerateStreamRequest(
        input=_input(n=2, stop=["STOP"], sampling_params=_params(max_tokens=300))
    )
    parts = [part async for part in stack.stub.GenerateStream(request)]
    for index in range(2):
        own = [part for part in parts[:-1] if part.index == index]
        assert "".join(part.text for part in own) == "né "
        assert [bool(part.finish_reason) for part in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].stop_reason.stop_string == "STOP"
    assert parts[-1].usage.completion_tokens == 2 * len("né STOP".encode())
    assert not any(part.HasField("usage") for part in parts[:-1])


async def test_parameters_reach_the_engine(stack: FakeStack) -> None:
    params = _params(
        max_tokens=3,
        min_tokens=1,
        temperature=0.5,
        top_k=9,
        seed=-7,
        logit_bias={70: 1.5},
        stop_token_ids=[80],
        ignore_eos=True,
    )
    await _generate(stack, sampling_params=params, priority=-2, cache_salt="s")
    added = stack.engine.added[-1]
    assert added.sampling_params == params
    assert (added.priority, added.cache_salt) == (-2, "s")


async def test_stop_token_is_named(stack: FakeStack) -> None:
    stack.engine.script = text_script("wait! more")
    stop = NUM_CONTROL + ord("!")
    answer = await _generate(stack, sampling_params=_params(stop_token_ids=[stop]))
    assert answer.choices[0].text == "wait"
    assert answer.choices[0].stop_reason.stop_token_id == stop


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "other"),
        ({"text": None}, grpc.StatusCode.INVALID_ARGUMENT, "text"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"text": "x" * 600}, grpc.StatusCode.INVALID_ARGUMENT, "600"),
        ({"n": 0}, grpc.StatusCode.INVALID_ARGUMENT, "n"),
        ({"stop": [""]}, grpc.StatusCode.INVALID_ARGUMENT, "stop"),
        ({"sampling_params": {"top_p": 2}}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        (
            {"sampling_params": {"temperature": float("nan")}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        ({"sampling_params": {"logprobs": 1}}, grpc.StatusCode.UNIMPLEMENTED, "logprobs"),
        (
            {"sampling_params": {"structured_output": {"regex": "a"}}},
            grpc.StatusCode.UNIMPLEMENTED,
            "structured_output",
        ),
        ({"text": None, "conversation": {}}, grpc.StatusCode.INVALID_ARGUMENT, "conversation"),
    ],
)
async def test_bad_requests_have_their_status(
    stack: FakeStack, more: dict[str, Any], code: grpc.StatusCode, word: str
) -> None:
    status, details = await _status(stack, **more)
    assert status == code
    assert word in details
    assert not stack.engine.added
    assert (await _generate(stack)).choices


async def test_the_engines_errors_have_their_status(stack: FakeStack) -> None:
    stack.engine.refuse = output_pb2.RequestError(
        code=output_pb2.REQUEST_ERROR_CODE_RESOURCE_EXHAUSTED, message="queue full", retryable=True
    )
    assert await _status(stack) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")


async def test_a_cancelled_call_aborts(stack: FakeStack) -> None:
    stack.engine.hold = True
    calls: list[Any] = [
        stack.stub.Generate(gateway_pb2.GenerateRequest(input=_input())),
        stack.stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=_input(n=2))),
    ]
    reading = asyncio.create_task(calls[1].read())
    await until(lambda: len(stack.engine.live) == 3)
    for call in calls:
        call.cancel()
    await until(lambda: not stack.engine.live)
    assert stack.engine.num_aborted == 3
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_deadline_travels_and_aborts(stack: FakeStack) -> None:
    stack.engine.hold = True
    request = gateway_pb2.GenerateRequest(input=_input())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.stub.Generate(request, timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < stack.engine.added[0].timeout_ms <= 300
    await until(lambda: not stack.engine.live)


async def test_keys_are_checked_g4(tmp_path: Path) -> None:
    """G4: every method."""
    async with running_stack(tmp_path, api_key=("key-1",)) as stack:
        stub = stack.stub
        calls: list[Any] = [
            (stub.Generate, gateway_pb2.GenerateRequest(input=_input())),
            (stub.Tokenize, gateway_pb2.TokenizeRequest(text="hi")),
            (stub.ListModels, gateway_pb2.ListModelsRequest()),
        ]
        for method, request in calls:
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(request, metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            await method(request, metadata=(("authorization", "Bearer key-1"),))
        stream = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=_input()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_models(stack: FakeStack) -> None:
    answer = await stack.stub.ListModels(gateway_pb2.ListModelsRequest())
    assert [model.id for model in answer.models] == [MODEL]
    assert answer.models[0].max_model_len == 512
    assert answer.models[0].created_unix_s > 0
