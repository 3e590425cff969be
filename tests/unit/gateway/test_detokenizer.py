import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE

from gateway.detokenizer import REPLACEMENT, WindowDetokenizer
from gateway.tokenizer import Tokenizer
from tests.fakes.tokenizer import NUM_CONTROL, VOCAB_SIZE, byte_backend, byte_ids

BYTES = Tokenizer(byte_backend())


def _sentencepiece() -> Tokenizer:
    """A tokenizer whose decoder joins bytes and strips the first space, as Llama 2's does."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁a", "b", "▁", "日"]
    backend = Backend(BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


SENTENCEPIECE = _sentencepiece()


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_every_prefix_equals_one_shot_decode_f7(ids: list[int]) -> None:
    """F7: any bytes at all, valid UTF-8 or not."""
    detokenizer = BYTES.detokenizer()
    text = ""
    for end, token_id in enumerate(ids, start=1):
        text += detokenizer.push([token_id])
        whole = BYTES.decode(ids[:end])
        assert whole.startswith(text)
        assert set(whole[len(text) :]) <= {REPLACEMENT}, "only an incomplete character is held"
    assert text + detokenizer.flush() == BYTES.decode(ids)


@given(st.text(max_size=30))
def test_no_half_character_is_shown_f7(text: str) -> None:
    """F7: whole characters only, each as soon as it is whole."""
    detokenizer = BYTES.detokenizer()
    shown = ""
    for char in text:
        pieces = [detokenizer.push([i]) for i in byte_ids(char)]
        shown += "".join(pieces)
        assert pieces == [""] * (len(pieces) - 1) + [char]
    assert shown == text


@given(st.text(max_size=30), st.integers(1, 7))
def test_grouping_of_tokens_does_not_matter(text: str, size: int) -> None:
    ids = byte_ids(text)
    detokenizer = BYTES.detokenizer()
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + detokenizer.flush() == text


def test_control_tokens_are_hidden_unless_asked_for() -> None:
    ids = [1, *byte_ids("hi"), 2]
    assert BYTES.detokenizer().push(ids) == "hi"
    shown = BYTES.detokenizer(skip_special_tokens=False).push(ids)
    assert shown == "<|im_start|>hi<|im_end|>"


def test_unknown_ids_show_nothing() -> None:
    assert BYTES.detokenizer().push([VOCAB_SIZE + 7, NUM_CONTROL + ord("x")]) == "x"


@given(
    st.lists(st.sampled_from(["▁a", "b", "▁", "日", "é", "😀"]), max_size=20),
    st.lists(st.sampled_from(["▁a", "b"]), max_size=8),
)
def test_window_equals_one_shot_decode_f7(words: list[str], prompt: list[str]) -> None:
    """F7 for a decoder that is not a map of bytes; the first output token keeps its space."""
    prompt_ids = [i for word in prompt for i in _piece_ids(word)]
    ids = [i for word in words for i in _piece_ids(word)]
    detokenizer = SENTENCEPIECE.detokenizer(prompt_ids)
    assert isinstance(detokenizer, WindowDetokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)
    whole = SENTENCEPIECE.decode(prompt_ids + ids)
    assert SENTENCEPIECE.decode(prompt_ids) + "".join(pieces) + detokenizer.flush() == whole


def _piece_ids(word: str) -> list[int]:
    known = SENTENCEPIECE.token_to_id(word)
    return [known] if known is not None else [1 + byte for byte in word.encode()]


def test_window_stays_small() -> None:
    """The work per token does not grow with the output."""
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return SENTENCEPIECE.decode(ids)

    detokenizer = WindowDetokenizer(decode)  # type: ignore[arg-type]
    for _ in range(200):
        detokenizer.push(_piece_ids("😀"))
    assert longest <= 10


@pytest.mark.parametrize("num_bytes", [17, 60])
def test_window_gives_up_on_endless_invalid_bytes(num_bytes: int) -> None:
    detokenizer = SENTENCEPIECE.detokenizer()
    text = "".join(detokenizer.push([1 + 0xFF]) for _ in range(num_bytes))
    assert REPLACEMENT in text
