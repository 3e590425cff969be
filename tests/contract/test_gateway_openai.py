"""The unmodified openai client against a gateway over a fake engine."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.engine import text_script
from tests.fakes.gateway import MODEL, FakeStack, running_stack, until
from tests.fakes.tokenizer import NUM_CONTROL, byte_ids

USER = [{"role": "user", "content": "hi"}]
PROMPTS = ["one", "two", "three"]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FakeStack]:
    async with running_stack(tmp_path) as running:
        yield running


async def _chat_chunks(stack: FakeStack, **more: Any) -> list[Any]:
    stream = await stack.openai.chat.completions.create(
        model=MODEL,
        messages=USER,  # type: ignore[arg-type]
        stream=True,
        **more,
    )
    return [chunk async for chunk in stream]  # type: ignore[union-attr]


async def test_a_completion_f1(stack: FakeStack) -> None:
    """F1: id, one choice, length, usage; the same from token ids; echo."""
    text = await stack.openai.completions.create(model=MODEL, prompt="Hello?", max_tokens=5, seed=3)
    assert text.id.startswith("cmpl-")
    assert text.object == "text_completion"
    assert len(text.choices) == 1
    assert text.choices[0].finish_reason == "length"
    assert text.usage is not None
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (6, 5)
    assert text.usage.total_tokens == 11
    assert text.usage.prompt_tokens_details is not None
    assert text.usage.prompt_tokens_details.cached_tokens == 3
    ids = await stack.openai.completions.create(
        model=MODEL, prompt=byte_ids("Hello?"), max_tokens=5, seed=3
    )
    assert ids.choices[0].text == text.choices[0].text
    for prompt in ("Hello?", byte_ids("Hello?")):
        echoed = await stack.openai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=5, seed=3, echo=True
        )
        assert echoed.choices[0].text == "Hello?" + text.choices[0].text


async def test_streamed_text_is_the_whole_text_f2(stack: FakeStack) -> None:
    """F2: also with characters of several bytes, one token each byte."""
    stack.engine.script = text_script("naïve 日本 😀 done")
    whole = await stack.openai.chat.completions.create(
        model=MODEL,
        messages=USER,  # type: ignore[arg-type]
        max_tokens=100,
    )
    chunks = await _chat_chunks(stack, max_tokens=100)
    assert whole.choices[0].message.content == "naïve 日本 😀 done"
    assert whole.choices[0].message.role == "assistant"
    assert all(len(chunk.choices) == 1 for chunk in chunks), "no empty choice"
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(c.delta.content or "" for c in choices) == "naïve 日本 😀 done"
    assert [c.delta.role for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_line_ends_inside_text_survive_f11(stack: FakeStack) -> None:
    """F11: characters that some readers of event streams take for line ends."""
    text = 'a\u2028b\u2029c\u0085d\ne\r\n"f"\\ \x0b\x0c\x1c\x00'
    stack.engine.script = text_script(text)
    chunks = await _chat_chunks(stack, max_tokens=100)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text


async def test_include_usage_f3(stack: FakeStack) -> None:
    """F3: one more chunk without choices at the end; all others say null."""
    chunks = await _chat_chunks(stack, max_tokens=4, stream_options={"include_usage": True})
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


async def test_continuous_usage_f3(stack: FakeStack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await _chat_chunks(stack, max_tokens=4, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert counts[0] >= 1


async def test_no_usage_unless_asked_f3(stack: FakeStack) -> None:
    response = await stack.chat(stream=True, max_tokens=3)
    assert '"usage"' not in response.text
    assert response.text.endswith("data: [DONE]\n\n")
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        await stack.openai.chat.completions.create(
            model=MODEL,
            messages=USER,  # type: ignore[arg-type]
            extra_body={"stream_options": {"include_usage": True}},
        )


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_prompts_times_n_f4(stack: FakeStack, tokens_per_step: int) -> None:
    """F4: choice index = prompt_i * n + j; streams interleave, each is its whole twin."""
    stack.engine.tokens_per_step = tokens_per_step
    arguments: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPTS,
        "n": 2,
        "seed": 11,
        "max_tokens": 7,
    }
    whole = await stack.openai.completions.create(**arguments)
    assert [choice.index for choice in whole.choices] == list(range(6))
    alone = await stack.openai.completions.create(**arguments | {"prompt": "two", "n": 1})
    assert whole.choices[2].text == alone.choices[0].text
    assert whole.usage.prompt_tokens == len("onetwothree"), "a prompt counts once"
    assert whole.usage.completion_tokens == 42
    streamed = ["" for _ in range(6)]
    reasons: list[int] = []
    async for chunk in await stack.openai.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            reasons += [choice.index] if choice.finish_reason else []
    assert streamed == [choice.text for choice in whole.choices]
    assert sorted(reasons) == list(range(6))


async def test_n_has_consecutive_seeds_in_one_message_d6(stack: FakeStack) -> None:
    """D6, A16: children are admitted together; seed + j, and int64 wraps."""
    before = stack.engine.num_add_messages
    await stack.chat(n=3, seed=2**63 - 2, max_tokens=1)
    seeds = [request.sampling_params.seed for request in stack.engine.added]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert stack.engine.num_add_messages == before + 1
    assert len({request.request_id for request in stack.engine.added}) == 3


async def test_unseeded_requests_are_seeded_here(stack: FakeStack) -> None:
    """So that a replay continues the same sample (law 2)."""
    for _ in range(2):
        await stack.chat(max_tokens=1)
    first, second = (request.sampling_params for request in stack.engine.added)
    assert first.HasField("seed")
    assert first.seed != second.seed


async def test_stop_string_f6(stack: FakeStack) -> None:
    """F6: cut, named, withheld from the stream; the engine is told to abort."""
    stack.engine.script = text_script("one STOP two", ends=False)
    stack.engine.step_s = 0.002
    whole = await stack.chat(stop=["STOP", "never"], max_tokens=400)
    choice = whole.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["stop_reason"] == "STOP"
    usage = whole.json()["usage"]
    assert usage["completion_tokens"] == len("one STOP")
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "known from the acknowledgement"
    assert stack.engine.num_aborted == 1
    chunks = await _chat_chunks(stack, stop="STOP", max_tokens=400)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one "
    kept = await stack.chat(stop="STOP", max_tokens=400, include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["message"]["content"] == "one STOP"
    await until(lambda: not stack.engine.live)


async def test_stop_token_is_reported_f6(stack: FakeStack) -> None:
    stack.engine.script = text_script("wait! more")
    answer = await stack.chat(stop_token_ids=[NUM_CONTROL + ord("!")], max_tokens=100)
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "wait"
    assert choice["stop_reason"] == NUM_CONTROL + ord("!")


async def test_parameters_reach_the_engine(stack: FakeStack) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "min_tokens": 1,
        "ignore_eos": True,
        "seed": -5,
    }
    more = {"logit_bias": {"70": -100, "71": 2.5}, "priority": -3, "cache_salt": "s"}
    answer = await stack.chat(**given, **more, max_completion_tokens=2, request_id="req-7")
    assert answer.status_code == 200
    request = stack.engine.added[-1]
    for name, value in given.items():
        assert getattr(request.sampling_params, name) == value, name
    assert dict(request.sampling_params.logit_bias) == {70: -100.0, 71: 2.5}
    assert request.sampling_params.max_tokens == 2
    assert (request.priority, request.cache_salt) == (-3, "s")
    assert request.request_id == "req-7"
    assert answer.headers["x-request-id"] == "req-7"
    assert answer.json()["id"] == "chatcmpl-req-7"


async def test_what_is_not_given_stays_unset(stack: FakeStack) -> None:
    await stack.chat(temperature=None, top_k=-1)
    params = stack.engine.added[-1].sampling_params
    set_fields = {field.name for field, _ in params.ListFields()}
    assert set_fields == {"seed", "top_k"}
    assert params.top_k == 0


async def test_messages_are_rendered(stack: FakeStack) -> None:
    """Text parts are joined; `developer` is `system` to a template; control text is plain text."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "<|im_end|>"},
    ]
    await stack.chat(messages=messages)
    expected = [1, *byte_ids("system\nbe brief"), 2, *byte_ids("\n")]
    expected += [1, *byte_ids("user\na\nb"), 2, *byte_ids("\n")]
    expected += [1, *byte_ids("assistant\n<|im_end|>"), 2, *byte_ids("\n")]
    expected += [1, *byte_ids("assistant\n")]
    assert list(stack.engine.added[-1].prompt_token_ids) == expected


async def test_unknown_fields_are_ignored_and_listed_f10(stack: FakeStack) -> None:
    answer = await stack.chat(store=True, made_up=[1], stream_options=None, max_tokens=1)
    assert answer.status_code == 200
    assert answer.headers["x-seamline-ignored-params"] == "made_up,store"
    plain = await stack.chat(max_tokens=1)
    assert "x-seamline-ignored-params" not in plain.headers


async def test_neutral_values_of_what_is_not_built_pass(stack: FakeStack) -> None:
    """SDKs and frameworks send defaults; only what asks for something is refused."""
    answer = await stack.chat(
        tools=[], tool_choice="auto", logprobs=False, response_format={"type": "text"}, user="u"
    )
    assert answer.status_code == 200
    assert "x-seamline-ignored-params" not in answer.headers


async def test_models(stack: FakeStack) -> None:
    models = await stack.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    model = await stack.openai.models.retrieve(MODEL)
    assert model.id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await stack.openai.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_errors_have_the_clients_classes_f10(stack: FakeStack) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await stack.openai.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await stack.openai.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as overflow:
        await stack.openai.completions.create(model=MODEL, prompt="x" * 600, max_tokens=10)
    assert overflow.value.code == "context_length_exceeded"
    assert "512" in overflow.value.message
    assert "600" in overflow.value.message


async def test_tokenize_and_back_f9(stack: FakeStack) -> None:
    """F9: the ids are those that generation uses."""
    answer = await stack.http.post("/tokenize", json={"prompt": "héllo"})
    assert answer.json() == {
        "tokens": byte_ids("héllo"),
        "count": 6,
        "max_model_len": 512,
    }
    back = await stack.http.post("/detokenize", json={"tokens": byte_ids("héllo")})
    assert back.json() == {"prompt": "héllo"}
    chat = await stack.http.post("/tokenize", json={"messages": USER})
    await stack.chat()
    assert chat.json()["tokens"] == list(stack.engine.added[-1].prompt_token_ids)


async def test_load_counts_what_runs_g3(stack: FakeStack) -> None:
    """G3: 0, 1 while a response is not finished, 0."""

    async def load() -> int:
        return int((await stack.http.get("/load")).json()["server_load"])

    assert await load() == 0
    stack.engine.step_s = 0.005
    stream = await stack.openai.completions.create(
        model=MODEL, prompt="x", stream=True, max_tokens=400
    )
    await anext(aiter(stream))
    assert await load() == 1
    await stream.close()
    await until(lambda: stack.handle.core.num_in_flight == 0)
    assert await load() == 0


async def test_metrics_equal_exact_totals_g2(stack: FakeStack) -> None:
    """G2: ten requests, two choices each."""
    for _ in range(10):
        await stack.chat(n=2, max_tokens=3)
    await until(lambda: not stack.handle.core.engine.stats.num_running_reqs)
    page = (await stack.http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    labels = f'engine="0",model_name="{MODEL}"'
    prompt = len(stack.engine.added[-1].prompt_token_ids)
    assert float(values[f"vllm:generation_tokens_total{{{labels}}}"]) == 60
    assert float(values[f"vllm:prompt_tokens_total{{{labels}}}"]) == 20 * prompt
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        assert float(values[f"vllm:{name}_count{{{labels}}}"]) == 20, name
        assert float(values[f"vllm:{name}_sum{{{labels}}}"]) > 0, name
    success = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="%s"}'
    assert float(values[success % MODEL]) == 20
    assert float(values[f"vllm:num_requests_running{{{labels}}}"]) == 0
    assert float(values[f"vllm:prefix_cache_queries_total{{{labels}}}"]) == 100
