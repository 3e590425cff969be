from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN

from gateway.chat_template import ChatTemplate
from gateway.errors import ContextLengthError
from gateway.prompt_encoder import PromptEncoder
from gateway.tokenizer import Tokenizer
from gateway.tracing import RequestTrace
from tests.fakes.tokenizer import byte_backend

TRACE = RequestTrace(INVALID_SPAN)
TEMPLATE = ChatTemplate("{{ messages[0].content }}", {})


class Unused(Tokenizer):
    """Counts as an encoding what must not happen."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("encoded")

    def encode_rendered(self, rendered: str, marker: str | None) -> list[int]:
        raise AssertionError("encoded")


@given(st.text())
def test_no_text_has_fewer_tokens_than_the_bound(text: str) -> None:
    tokenizer = Tokenizer(byte_backend())
    assert tokenizer.fewest_tokens(len(text)) <= len(tokenizer.encode(text))


async def test_what_cannot_fit_is_refused_before_it_is_encoded() -> None:
    """A text of megabytes would take gigabytes and half a minute to encode, only to be refused."""
    encoder = PromptEncoder(Unused(byte_backend()), TEMPLATE, lambda: 100)
    text = "x" * 1_000_000
    with pytest.raises(ContextLengthError, match="1000000 characters"):
        await encoder.encode_text(text, TRACE)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    with pytest.raises(ContextLengthError) as caught:
        await encoder.encode_chat(messages, TRACE)
    assert caught.value.param == "messages"


async def test_what_may_fit_is_encoded() -> None:
    encoder = PromptEncoder(Tokenizer(byte_backend()), TEMPLATE, lambda: 100)
    assert len(await encoder.encode_text("x" * 90, TRACE)) >= 90
    unknown = PromptEncoder(Tokenizer(byte_backend()), TEMPLATE)
    assert len(await unknown.encode_text("x" * 5_000, TRACE)) >= 5_000
