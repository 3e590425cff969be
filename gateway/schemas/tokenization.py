"""POST /tokenize and /detokenize."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from gateway.schemas.body import FreeObject, Schema
from gateway.schemas.chat import ChatMessage
from gateway.schemas.generation import TokenId


class TokenizeBody(Schema):
    """A text or a conversation to encode."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: FreeObject | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given")
        return self


class DetokenizeBody(Schema):
    """Token ids to decode."""

    model: str | None = None
    tokens: list[TokenId]
