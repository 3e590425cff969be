"""Renders a model's chat template in a sandbox, with Hugging Face's conventions.

A template is data that came with the model. It sees immutable values only, and its output and its
time are bounded.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.errors import FailedPreconditionError, InvalidArgumentError

MAX_RENDERED_CHARS: Final = 64 * 1024 * 1024
MAX_RENDER_S: Final = 5.0
_FAULTS: Final = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What a template raises that does not fit the messages."""


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks what a model wrote; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without Jinja's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja text.
        special_tokens: what the template knows as `bos_token`, `eos_token`, …
        clock: monotonic seconds.

    Errors: FailedPreconditionError when the text is not a template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise FailedPreconditionError(
                f"the chat template is not valid: line {error.lineno}: {error.message}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: `role` and `content` of each, in order.
            add_generation_prompt: end with what opens the assistant's next message.
            extra: further variables of the template.

        Errors: InvalidArgumentError (`messages`) when the template refuses them, or when its output
        or its time passes the bounds.
        """
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(extra or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._bounded(variables)
        except SecurityError as error:
            raise InvalidArgumentError(
                "the chat template did something that is not allowed", param="messages"
            ) from error
        except TemplateError as error:
            raise InvalidArgumentError(
                f"the chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except _FAULTS as error:
            raise InvalidArgumentError(
                "the chat template cannot render these messages", param="messages"
            ) from error

    def _bounded(self, variables: Mapping[str, Any]) -> str:
        deadline = self._clock() + MAX_RENDER_S
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS or self._clock() > deadline:
                raise TemplateError("its output is too long or takes too long")
        return "".join(pieces)
