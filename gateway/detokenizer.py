"""Token ids to text, piece by piece.

For every prefix of the output the concatenated pieces equal the one-shot decode of that prefix,
but for an incomplete UTF-8 character at its end, which is held back until it is whole or the output
ends.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
CONTEXT_TOKENS: Final = 6
"""Prompt tokens that a window begins with: what a decoder's first-token rules could look at."""
MAX_HELD_TOKENS: Final = 16
"""Held tokens after which a replacement character is believed: no character is longer in tokens."""


class Detokenizer(Protocol):
    """The text of one sequence of tokens, as it grows."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; whole characters only."""

    def flush(self) -> str:
        """What is held back, with replacement characters for what is incomplete; at the end."""


class ByteLevelDetokenizer:
    """For byte-level BPE: each token is a fixed run of bytes, so a UTF-8 decoder is all it takes.

    Args:
        token_bytes: the bytes of a token; empty for one that is not shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any decoder: decodes a window that begins a few tokens back, and takes the difference.

    The window moves on each time it yields text, so that the work per token does not grow with the
    output. (The method is text-generation-inference's: a prefix offset and a read offset.)

    Args:
        decode: the one-shot decoder.
        context_ids: the prompt; its end is the first window's context.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._ids = list(context_ids[-CONTEXT_TOKENS:])
        self._num_context = len(self._ids)
        self._shown = decode(self._ids) if self._ids else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        num_held = len(self._ids) - self._num_context
        if text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            del self._ids[: self._num_context]
            self._num_context = len(self._ids)
            self._shown = self._decode(self._ids)
        return new
