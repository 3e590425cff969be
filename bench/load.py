"""A closed-loop load on an OpenAI server: each of a few clients has one request at a time."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import orjson

FIRST_TOKEN_ID: Final = 1_000
LAST_TOKEN_ID: Final = 40_000
"""Prompts are random ordinary tokens: exact lengths, and nothing is shared by chance."""
REQUEST_TIMEOUT_S: Final = 600.0
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Workload:
    """What the clients ask for.

    Attributes:
        num_prompts: requests in all.
        concurrency: clients.
        input_len: tokens of a prompt after the shared prefix.
        output_len: tokens of each answer.
        prefix_len: tokens that all prompts begin with.
        seed: of the prompts.
    """

    num_prompts: int
    concurrency: int
    input_len: int
    output_len: int
    prefix_len: int = 0
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """The prompts, as token ids."""
        rng = random.Random(self.seed)
        prefix = _random_tokens(rng, self.prefix_len)
        return [prefix + _random_tokens(rng, self.input_len) for _ in range(self.num_prompts)]


WORKLOADS: Final = {
    "A": Workload(num_prompts=16, concurrency=1, input_len=128, output_len=128),
    "B": Workload(num_prompts=64, concurrency=16, input_len=128, output_len=64),
    "C": Workload(num_prompts=32, concurrency=8, input_len=64, output_len=32, prefix_len=512),
    "D": Workload(num_prompts=8, concurrency=2, input_len=1_500, output_len=16),
}
"""One stream; many at once; many with one prefix; long prompts."""


@dataclass(slots=True)
class Answer:
    """What one request got.

    Attributes:
        num_tokens: output tokens, as the server counts them.
        sent_s: when it was sent.
        token_times_s: when each chunk with text arrived.
    """

    num_tokens: int = 0
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a run of a workload brought; times in seconds."""

    duration_s: float
    num_output_tokens: int
    ttft_s: list[float]
    itl_s: list[float]


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]


async def run_load(base_url: str, model: str, workload: Workload, api_key: str = "") -> LoadResult:
    """Runs a workload.

    Errors: httpx.HTTPStatusError when the server refuses a request; RuntimeError when an answer is
    short or ends in an error.
    """
    prompts = iter(workload.prompts())
    answers: list[Answer] = []
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=workload.concurrency)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=REQUEST_TIMEOUT_S, limits=limits
    ) as http:
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(workload.concurrency):
                clients.create_task(_client(http, model, workload, prompts, answers))
        duration_s = time.perf_counter() - started_s
    return LoadResult(
        duration_s=duration_s,
        num_output_tokens=sum(answer.num_tokens for answer in answers),
        ttft_s=[answer.token_times_s[0] - answer.sent_s for answer in answers],
        itl_s=[
            later - earlier
            for answer in answers
            for earlier, later in zip(answer.token_times_s, answer.token_times_s[1:], strict=False)
        ],
    )


async def _client(
    http: httpx.AsyncClient,
    model: str,
    workload: Workload,
    prompts: Iterator[list[int]],
    answers: list[Answer],
) -> None:
    for prompt in prompts:
        answer = await _ask(http, model, prompt, workload.output_len)
        if answer.num_tokens != workload.output_len:
            raise RuntimeError(f"{answer.num_tokens} tokens instead of {workload.output_len}")
        answers.append(answer)


async def _ask(http: httpx.AsyncClient, model: str, prompt: list[int], output_len: int) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(sent_s=time.perf_counter())
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(answer, orjson.loads(line[len(_DATA) :]))
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise RuntimeError(chunk["error"]["message"])
    if chunk["choices"]:
        answer.token_times_s.append(time.perf_counter())
    elif chunk["usage"]:
        answer.num_tokens = chunk["usage"]["completion_tokens"]
