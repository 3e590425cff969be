"""Text to token ids, and the means to go back, on the `tokenizers` library."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from gateway.control_tokens import ControlTokenGuard
from gateway.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes are themselves, the rest come after 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR: Final = _byte_of_char()
_MOST_CHARS_NORMALIZED_TO_ONE: Final = 4


class Tokenizer:
    """The tokenizer of one model. Safe to share: no method changes what another sees.

    Args:
        backend: complete, with its post-processor.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._guard = ControlTokenGuard(t.content for t in added.values() if t.special)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._backend.get_vocab_size()

    @property
    def special_ids(self) -> frozenset[int]:
        """The control tokens, which output text does not show."""
        return self._special_ids

    def fewest_tokens(self, num_chars: int) -> int:
        """A lower bound of the tokens that a text of this length has."""
        return num_chars // self._longest_token_chars

    @cached_property
    def _longest_token_chars(self) -> int:
        """The most characters of a text that one token may stand for."""
        longest = max(map(len, self._backend.get_vocab()), default=1)
        # a normalizer may write a few characters as one
        return longest * (_MOST_CHARS_NORMALIZED_TO_ONE if self._backend.normalizer else 1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; control tokens that it spells are taken as such.

        Args:
            text: any text.
            add_special_tokens: put the model's beginning and end tokens around it, if it has any.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def protect(self, value: Any) -> tuple[Any, str | None]:  # noqa: ANN401 - JSON values
        """Prepares a client's messages for a template; see `control_tokens`."""
        return self._guard.protect(value)

    def encode_rendered(self, rendered: str, marker: str | None) -> list[int]:
        """The ids of a rendered template.

        Args:
            rendered: the text, control tokens written out.
            marker: what `protect` returned: control tokens from the messages become plain text.
        """
        if marker is None:
            return self.encode(rendered, add_special_tokens=False)
        ids: list[int] = []
        for text, is_plain in self._guard.split(rendered, marker):
            ids += (
                self._encode_plain(text)
                if is_plain
                else self.encode(text, add_special_tokens=False)
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of complete output."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's text."""
        return self._backend.token_to_id(token)

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A detokenizer for output that follows a prompt."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(
                self._shown_bytes if skip_special_tokens else self._token_bytes
            )
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt_ids
        )

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of text in which no added token is recognised."""
        normalizer, pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        if normalizer:
            text = normalizer.normalize_str(text)
        words = (
            [word for word, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else [text]
        )
        model = self._backend.model
        return [token.id for word in words for token in model.tokenize(word)]

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._token_bytes(token_id)

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in byte-level BPE; none for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = self._backend.id_to_token(token_id) or ""
        try:
            content = bytes(BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token, whose text is written as it is
            content = token.encode()
        self._bytes[token_id] = content
        return content
