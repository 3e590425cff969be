"""Text and conversations to prompt tokens, off the loop when it would take long."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from gateway.chat_template import ChatTemplate
from gateway.errors import ContextLengthError
from gateway.tokenizer import Tokenizer
from gateway.tracing import RequestTrace
from services.errors import InvalidArgumentError

INLINE_CHARS: Final = 16_384
"""Texts up to this long are worked on in the loop: a thread's hand-over costs more than they do."""

T = TypeVar("T")


async def _run(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)


class PromptEncoder:
    """Makes prompts for one model.

    Args:
        tokenizer: the model's.
        template: its chat template, if it has one.
        max_model_len: tells the longest sequence in tokens; None while nobody knows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len

    def _check_length(self, num_chars: int, param: str) -> None:
        """Refuses a text that cannot fit, before the time and memory that encoding it would take.

        Errors: ContextLengthError.
        """
        limit = self._max_model_len()
        if limit is not None and (fewest := self.tokenizer.fewest_tokens(num_chars)) > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, but the prompt has "
                f"{num_chars} characters, which are at least {fewest} tokens.",
                param=param,
            )

    async def encode_text(
        self, text: str, trace: RequestTrace, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of a text; control tokens that it spells are taken as such.

        Errors: ContextLengthError when it is far too long.
        """
        self._check_length(len(text), "prompt")
        with trace.child("gateway.tokenize") as span:
            ids = await _run(
                len(text),
                lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens),
            )
            span.set_attribute("seamline.num_tokens", len(ids))
        return ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        trace: RequestTrace,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation; control tokens in its messages become plain text.

        Args:
            messages: `role` and `content` of each, in order.
            trace: the request's.
            add_generation_prompt: end with what opens the assistant's next message.
            extra: further variables of the template.

        Errors: InvalidArgumentError when the template refuses, or there is none;
        ContextLengthError when the messages are far too long.
        """
        template = self._template
        if template is None:
            raise InvalidArgumentError("the model has no chat template", param="messages")
        num_chars = sum(len(str(message["content"])) for message in messages)
        self._check_length(num_chars, "messages")
        with trace.child("gateway.render"):

            def render() -> tuple[str, str | None]:
                (safe_messages, safe_extra), marker = self.tokenizer.protect(
                    (list(messages), dict(extra or {}))
                )
                rendered = template.render(
                    safe_messages, add_generation_prompt=add_generation_prompt, extra=safe_extra
                )
                return rendered, marker

            rendered, marker = await _run(num_chars, render)
        with trace.child("gateway.tokenize") as span:
            ids = await _run(
                len(rendered), lambda: self.tokenizer.encode_rendered(rendered, marker)
            )
            span.set_attribute("seamline.num_tokens", len(ids))
        return ids
