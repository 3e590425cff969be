"""The unmodified openai client against the whole stack on the real model."""

import asyncio
import random

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from bench.launched_stack import LaunchedStack
from tests.e2e.conftest import MODEL
from tests.e2e.operations import sample, wait_until_idle

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


def test_models_lists_the_default_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_answers(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37
    assert answer.usage.total_tokens == 37 + answer.usage.completion_tokens


def test_a_completion_continues_the_text(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=1
    )
    assert answer.choices[0].text == " Paris"
    assert answer.choices[0].finish_reason == "length"


def test_streamed_text_is_the_whole_text(client: OpenAI) -> None:
    """F2, F3."""
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=30
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert text == whole.choices[0].message.content
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_stop_string_cuts_the_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, stop=[" is"]
    )
    assert answer.choices[0].message.content == "The capital of France"
    assert answer.choices[0].finish_reason == "stop"


def test_n_with_a_seed_is_distinct_and_reproducible(client: OpenAI) -> None:
    """D6 through HTTP."""

    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Invent a name for a ship."}],
            n=3,
            seed=7,
            temperature=1,
            top_p=0.95,
            max_tokens=24,
            extra_body={"top_k": 40},
        )
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


async def test_a_seeded_sample_is_the_same_alone_and_in_company(
    async_client: AsyncOpenAI,
) -> None:
    """D6: at temperature 1 over the whole vocabulary, with a cold and a warm prefix cache."""

    async def one(index: int) -> str:
        answer = await async_client.completions.create(
            model=MODEL,
            prompt=f"{index}. Once upon a time there was a very old lighthouse keeper who",
            max_tokens=32,
            temperature=1,
            seed=index,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    together = await asyncio.gather(*(one(index) for index in range(8)))
    assert [await one(index) for index in range(8)] == together


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["x"] * 100}, "stop"),
    ],
)
def test_bad_parameters_are_named(client: OpenAI, arguments: dict[str, object], param: str) -> None:
    """F10."""
    request = {"model": MODEL, "messages": QUESTION, "max_tokens": 1} | arguments
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request)  # type: ignore[call-overload]
    assert caught.value.param == param


def test_an_unknown_model_and_a_long_prompt_are_refused(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as overflow:
        client.completions.create(model=MODEL, prompt="word " * 20_000)
    assert overflow.value.code == "context_length_exceeded"


async def test_64_streams_finish_and_leave_nothing(
    async_client: AsyncOpenAI, stack: LaunchedStack
) -> None:
    async def one(index: int) -> tuple[str, str | None]:
        stream = await async_client.completions.create(
            model=MODEL,
            prompt=f"Count from {index}: {index},",
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text, reason = "", None
        async for chunk in stream:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    answers = await asyncio.gather(*(one(index) for index in range(64)))
    assert {reason for _, reason in answers} == {"length"}
    assert all(text for text, _ in answers)
    await wait_until_idle(stack)


async def test_200_random_cancels_leave_nothing(
    async_client: AsyncOpenAI, stack: LaunchedStack
) -> None:
    """C5: a cancelled client's blocks come back."""
    rng = random.Random(5)
    at_once = asyncio.Semaphore(32)

    async def one(index: int) -> None:
        async with at_once:
            request = async_client.completions.create(
                model=MODEL,
                prompt=f"A long story about the number {index}. " * 8,
                max_tokens=400,
                stream=bool(index % 2),
                extra_body={"ignore_eos": True},
            )
            task = asyncio.ensure_future(_read(request))
            await asyncio.sleep(rng.uniform(0, 0.5))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(one(index) for index in range(200)))
    await wait_until_idle(stack)
    assert sample(stack, "vllm:num_requests_waiting") == 0


async def _read(request: object) -> None:
    answer = await request  # type: ignore[misc]
    async for _ in answer:
        pass
