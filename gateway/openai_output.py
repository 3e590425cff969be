"""The answers of the two endpoints, whole and as server-sent events.

A text chunk is three pieces of bytes, of which only the text is new: building it costs about a
microsecond, and it is the one thing done per token and choice.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gateway.generation import Usage
from gateway.output_processor import TextDelta

DONE: Final = b"data: [DONE]\n\n"
# line ends to some readers of server-sent events, though not by the standard
_LINE_ENDS: Final = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\u0085".encode(), b"\\u0085"),
)


def dump(value: object) -> bytes:
    """JSON without characters that could be taken for line ends."""
    content = orjson.dumps(value)
    if not content.isascii():
        for char, escape in _LINE_ENDS:
            content = content.replace(char, escape)
    return content


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(slots=True, frozen=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str


@dataclass(slots=True, frozen=True)
class AnswerOptions:
    """What a stream says of token counts.

    Attributes:
        with_usage: the stream ends with them, and other chunks say `usage: null`.
        with_continuous_usage: each chunk has the counts so far.
    """

    with_usage: bool = False
    with_continuous_usage: bool = False


@dataclass(slots=True)
class _ChoiceText:
    pieces: list[str] = field(default_factory=list)
    last: TextDelta | None = None


class AnswerFormat(ABC):
    """How one endpoint writes its answers; the subclasses say what differs.

    Args:
        head: what every chunk repeats.
        options: what it says of token counts.
        echoes: text to put before each choice's own; empty: none.
    """

    object_name: str
    chunk_object_name: str

    def __init__(
        self,
        head: AnswerHead,
        options: AnswerOptions,
        echoes: Sequence[str] = (),
    ) -> None:
        self._head = head
        self._echoes = echoes
        self._options = options
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def chunk_choice(self, text: str, is_first: bool) -> dict[str, Any]:
        """The part of a chunk's choice that holds text."""

    @abstractmethod
    def whole_choice(self, text: str) -> dict[str, Any]:
        """The part of a whole answer's choice that holds text."""

    def chunks(self, deltas: Sequence[TextDelta], usage: Callable[[], Usage]) -> bytes:
        """The events for what is new; empty when nothing is to be shown."""
        return b"".join([self._chunk(delta, usage) for delta in deltas])

    def last_chunk(self, usage: Usage) -> bytes:
        """What ends a stream."""
        if not self._options.with_usage:
            return DONE
        counts = self._envelope(self.chunk_object_name, [], {"usage": usage_object(usage)})
        return event(counts) + DONE

    def whole(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        """The answer that is not a stream, from all deltas."""
        texts: dict[int, _ChoiceText] = {}
        for delta in deltas:
            choice = texts.setdefault(delta.index, _ChoiceText([self._echo(delta.index)]))
            choice.pieces.append(delta.text)
            choice.last = delta
        choices = [
            self._choice(index, self.whole_choice("".join(choice.pieces)), choice.last)
            for index, choice in sorted(texts.items())
        ]
        counts = {"usage": usage_object(usage)}
        return orjson.dumps(self._envelope(self.object_name, choices, counts))

    def _chunk(self, delta: TextDelta, usage: Callable[[], Usage]) -> bytes:
        if not delta.text and delta.finish_reason is None:
            return b""
        frame = self._frames.get(delta.index)
        if (
            frame is not None
            and delta.finish_reason is None
            and not self._options.with_continuous_usage
        ):
            return frame[0] + dump(delta.text) + frame[1]
        is_first = frame is None
        if is_first:
            self._frames[delta.index] = self._frame(delta.index)
        text = self._echo(delta.index) + delta.text if is_first else delta.text
        choice = self._choice(delta.index, self.chunk_choice(text, is_first), delta)
        return event(self._envelope(self.chunk_object_name, [choice], self._running(usage)))

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """The bytes around the text of a chunk that is neither a choice's first nor its last."""
        marker = "\x00text\x00"
        choice = self._choice(index, self.chunk_choice(marker, False), None)
        extra = {"usage": None} if self._options.with_usage else {}
        whole = event(self._envelope(self.chunk_object_name, [choice], extra))
        before, after = whole.split(orjson.dumps(marker))
        return before, after

    def _running(self, usage: Callable[[], Usage]) -> dict[str, Any]:
        if self._options.with_continuous_usage:
            return {"usage": usage_object(usage())}
        return {"usage": None} if self._options.with_usage else {}

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _choice(
        self, index: int, content: dict[str, Any], delta: TextDelta | None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None}
        if delta is not None and delta.finish_reason is not None:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        return choice

    def _envelope(
        self, object_name: str, choices: Sequence[dict[str, Any]], extra: dict[str, Any]
    ) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": object_name,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            **extra,
        }


class ChatFormat(AnswerFormat):
    """POST /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def chunk_choice(self, text: str, is_first: bool) -> dict[str, Any]:
        """The first chunk of each choice carries the role."""
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}

    def whole_choice(self, text: str) -> dict[str, Any]:
        """A message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionFormat(AnswerFormat):
    """POST /v1/completions."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def chunk_choice(self, text: str, is_first: bool) -> dict[str, Any]:
        """Plain text."""
        return {"text": text}

    def whole_choice(self, text: str) -> dict[str, Any]:
        """Plain text."""
        return {"text": text}
