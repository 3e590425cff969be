"""Keeps the text of control tokens in a client's messages from becoming control tokens.

A chat template writes control tokens (`<|im_end|>`) around the client's text. The text may spell
one itself, and encoding the rendered whole would let the client close its own message and open a
system one. So, when a message spells one (which is rare):

1. `protect` breaks each with a marker character that occurs nowhere in the messages;
2. the template renders the protected messages: intact control tokens now come from the template;
3. `split` cuts the result at the intact ones; pieces with markers lose them and are encoded as
   plain text. Encoding cuts text at control tokens first of all, so the pieces get the same ids as
   the whole would.

Without such a message nothing is changed and the whole is encoded as it is.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from services.errors import InvalidArgumentError

# Unicode noncharacters: never part of interchanged text, and no template treats them as space
_MARKERS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ControlTokenGuard:
    """Knows the control tokens of one tokenizer.

    Args:
        texts: their texts; those of a single character cannot be broken and are left out.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        # texts that the template's own neighbouring text could complete
        self._heads = tuple({text[:i] for text in ordered for i in range(1, len(text))})
        self._tails = tuple({text[i:] for text in ordered for i in range(1, len(text))})

    def protect(self, value: Any) -> tuple[Any, str | None]:  # noqa: ANN401 - JSON values
        """The value with control tokens in its strings broken, and the marker that breaks them.

        The marker is None, and the value unchanged, when it spells none.
        """
        strings = list(_strings(value))
        if self._pattern is None or not any(map(self._is_risky, strings)):
            return value, None
        used = set().union(*map(set, strings))
        marker = next((m for m in _MARKERS if m not in used), None)
        if marker is None:
            raise InvalidArgumentError("the text is not valid Unicode", param="messages")
        return self._broken(value, marker), marker

    def split(self, rendered: str, marker: str) -> Iterator[tuple[str, bool]]:
        """Cuts the rendered text into (piece, whether it is plain text), in order."""
        if self._pattern is None:
            return
        start = trusted_from = 0
        for match in [*self._pattern.finditer(rendered), None]:
            end = match.start() if match else len(rendered)
            if marker in rendered[start:end]:
                if trusted_from < start:
                    yield rendered[trusted_from:start], False
                yield rendered[start:end].replace(marker, ""), True
                trusted_from = end
            start = match.end() if match else end
        if trusted_from < len(rendered):
            yield rendered[trusted_from:], False

    def _is_risky(self, text: str) -> bool:
        assert self._pattern is not None
        return bool(
            self._pattern.search(text) or text.endswith(self._heads) or text.startswith(self._tails)
        )

    def _broken(self, value: Any, marker: str) -> Any:  # noqa: ANN401 - JSON values
        if isinstance(value, str):
            return self._broken_text(value, marker)
        if isinstance(value, dict):
            # a key's ends stay: the template looks keys up by name
            return {self._without(k, marker): self._broken(v, marker) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(item, marker) for item in value]
        return value

    def _without(self, text: str, marker: str) -> str:
        assert self._pattern is not None
        # again until none is left: breaking one can leave another that overlapped it
        while (broken := self._pattern.sub(lambda m: m[0][0] + marker + m[0][1:], text)) != text:
            text = broken
        return text

    def _broken_text(self, text: str, marker: str) -> str:
        text = self._without(text, marker)
        if text.endswith(self._heads):
            text += marker
        if text.startswith(self._tails):
            text = marker + text
        return text


def _strings(value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON values
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
