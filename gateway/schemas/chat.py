"""POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from gateway.schemas.body import FreeObject, Schema
from gateway.schemas.generation import GenerationBody
from services.errors import UnimplementedError

MAX_MESSAGES: Final = 16_384
"""Bounds what one body may cost to check; each message takes a few tokens, so none is missed."""


class ContentPart(Schema):
    """A part of a message's content; only text is built."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.type == "text" and self.text is None:
            raise ValueError("a text part needs its text")
        return self


ContentParts = TypeAliasType("ContentParts", Annotated[list[ContentPart], FailFast()])
"""An alias that has a name, because unions must hash their members and FailFast does not."""


class ChatMessage(Schema):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ContentParts | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None

    def for_template(self, position: int) -> dict[str, Any]:
        """The message as templates know it: OpenAI's `developer` is everyone else's `system`.

        Errors: UnimplementedError for tools and for parts that are not text.
        """
        if self.tool_calls or self.function_call or self.role in ("tool", "function"):
            raise UnimplementedError("tools are not supported", param=f"messages[{position}]")
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self._text(position)}

    def _text(self, position: int) -> str:
        if isinstance(self.content, str):
            return self.content
        for i, part in enumerate(self.content or ()):
            if part.type not in ("text", "input_text"):
                raise UnimplementedError(
                    f"content parts of type {part.type!r} are not supported",
                    param=f"messages[{position}].content[{i}]",
                )
        return "\n".join(part.text or "" for part in self.content or ())

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not (self.tool_calls or self.function_call):
            raise ValueError("content must be text or a list of parts")
        return self


class ChatCompletionBody(GenerationBody):
    """The body of a chat completion."""

    NEUTRAL: ClassVar[dict[str, list[Any]]] = GenerationBody.NEUTRAL | {
        "audio": [],
        "chat_template": [],
        "continue_final_message": [False],
        "documents": [[]],
        "function_call": ["none"],
        "functions": [[]],
        "modalities": [["text"]],
        "prediction": [],
        "reasoning_effort": [],
        "tool_choice": ["none", "auto"],
        "tools": [[]],
        "top_logprobs": [0],
        "web_search_options": [],
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: FreeObject | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` is the newer name, and wins."""
        return self.max_completion_tokens or self.max_tokens

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as templates know them."""
        return [message.for_template(i) for i, message in enumerate(self.messages)]
