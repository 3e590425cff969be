"""POST /v1/completions."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from gateway.schemas.generation import GenerationBody


def _as_prompts(value: Any) -> list[str | list[int]]:  # noqa: ANN401 - a validator sees anything
    """The four forms of a prompt, as a list of texts or ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, or token ids, and not empty")
    if all(type(item) is int for item in value):
        value = [value]
    prompts: list[str | list[int]] = value
    for item in prompts:
        is_ids = isinstance(item, list) and all(type(i) is int and i >= 0 for i in item)
        if not (isinstance(item, str) or is_ids):
            raise ValueError("must hold only strings, or only token ids")
        if len(item) == 0:
            raise ValueError("a prompt must not be empty")
    return prompts


class CompletionBody(GenerationBody):
    """The body of a completion."""

    NEUTRAL: ClassVar[dict[str, list[Any]]] = {
        name: values for name, values in GenerationBody.NEUTRAL.items() if name != "echo"
    } | {"prompt_embeds": []}

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts), Field(max_length=1024)]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = 16
