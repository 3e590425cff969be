import json
from typing import Any

import pytest

from gateway.generation import Usage
from gateway.openai_output import (
    DONE,
    AnswerFormat,
    AnswerHead,
    AnswerOptions,
    ChatFormat,
    CompletionFormat,
)
from gateway.output_processor import TextDelta
from gateway.request import FinishReason

HEAD = AnswerHead("id-1", 17, 'model "x"')
USAGE = Usage(3, 2, 1)


def _events(content: bytes) -> list[Any]:
    parts = content.decode().strip().split("\n\n")
    return [json.loads(part.removeprefix("data: ")) for part in parts if part != "data: [DONE]"]


def _chunks(answer: AnswerFormat, *deltas: TextDelta) -> list[Any]:
    return _events(b"".join(answer.chunks([delta], lambda: USAGE) for delta in deltas))


@pytest.mark.parametrize("text", ["b", '"quoted"\\', "\x00text\x00", "é日😀", "\u2028\u2029\u0085"])
@pytest.mark.parametrize("with_usage", [False, True])
def test_the_quick_chunk_equals_the_full_one(text: str, with_usage: bool) -> None:
    """A choice's middle chunks are built from pieces; they are what the encoder would write."""
    answer = ChatFormat(HEAD, AnswerOptions(with_usage))
    first, middle = _chunks(answer, TextDelta(2, "a", [1]), TextDelta(2, text, [2]))
    expected = {**first, "choices": [{**first["choices"][0], "delta": {"content": text}}]}
    assert middle == expected
    assert ("usage" in middle) == with_usage


def test_nothing_new_to_show_is_no_chunk() -> None:
    answer = CompletionFormat(HEAD, AnswerOptions())
    assert answer.chunks([TextDelta(0, "", [1])], lambda: USAGE) == b""


def test_events_have_no_character_that_could_end_a_line() -> None:
    answer = CompletionFormat(HEAD, AnswerOptions())
    deltas = [TextDelta(0, "a", []), TextDelta(0, "\u2028\u2029\u0085\n\r\x0b\x0c\x1c", [])]
    content = answer.chunks(deltas, lambda: USAGE).decode()
    assert content.splitlines() == content.split("\n")[:-1]
    assert _events(content.encode())[1]["choices"][0]["text"] == deltas[1].text


def test_the_role_comes_once_per_choice() -> None:
    answer = ChatFormat(HEAD, AnswerOptions())
    chunks = _chunks(answer, *(TextDelta(i, "a", []) for i in (0, 1, 0, 1)))
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
    assert roles == ["assistant", "assistant", None, None]


def test_the_last_chunk_of_a_choice() -> None:
    answer = CompletionFormat(HEAD, AnswerOptions())
    (chunk,) = _chunks(answer, TextDelta(0, "", [], FinishReason.STOP, "END"))
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert chunk["choices"] == [{**choice, "stop_reason": "END"}]


def test_the_end_of_a_stream() -> None:
    assert CompletionFormat(HEAD, AnswerOptions()).last_chunk(USAGE) == DONE
    end = CompletionFormat(HEAD, AnswerOptions(True)).last_chunk(USAGE)
    assert end.endswith(DONE)
    (chunk,) = _events(end)
    assert chunk["choices"] == []
    assert chunk["usage"]["total_tokens"] == 5
    assert chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_whole_answer_joins_each_choice_in_order() -> None:
    answer = CompletionFormat(HEAD, AnswerOptions(), ["p0 ", "p1 "])
    deltas = [TextDelta(1, "b", []), TextDelta(0, "a", []), TextDelta(1, "c", [])]
    deltas += [TextDelta(i, "", [], FinishReason.LENGTH) for i in (0, 1)]
    body = json.loads(answer.whole(deltas, USAGE))
    assert [choice["text"] for choice in body["choices"]] == ["p0 a", "p1 bc"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    chat = json.loads(ChatFormat(HEAD, AnswerOptions()).whole(deltas, USAGE))
    assert chat["choices"][1]["message"]["content"] == "bc"
    assert chat["object"] == "chat.completion"
