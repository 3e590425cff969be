"""The tokenizer inside a GGUF file, as a Hugging Face `tokenizers` file.

Only byte-level BPE (`tokenizer.ggml.model` = gpt2) is built. A GGUF names its pre-tokenizer and
does not describe it; the table below holds what the model families' own tokenizer.json files say.
"""

import importlib
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from gateway.tokenizer_config import TokenizerConfig
from services.errors import FailedPreconditionError, UnimplementedError

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_PREFIX: Final = "tokenizer.ggml."

# the regular expressions of Llama 3 and Qwen 2; they differ in how many digits go together
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool = True) -> Any:  # noqa: ANN401 - tokenizers' stubs lack the base
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_by(digits: str) -> Any:  # noqa: ANN401 - as above
    words = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence([words, _byte_level(use_regex=False)])


def _pre_tokenizer(name: str) -> Any:  # noqa: ANN401 - as above
    match name:
        case "default" | "gpt-2":
            return _byte_level()
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, _byte_level()])
        case "llama-bpe":
            return _split_by(r"\p{N}{1,3}")
        case "qwen2":
            return _split_by(r"\p{N}")
    raise UnimplementedError(f"its pre-tokenizer {name!r} is not supported")


class _Metadata:
    """Typed reads of a GGUF's key-value pairs."""

    def __init__(self, path: Path) -> None:
        # imported here: parsing takes seconds and memory that a cached tokenizer saves
        gguf = importlib.import_module("gguf")
        self._fields = gguf.GGUFReader(path, "r").fields

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - the file decides
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def require(self, name: str) -> Any:  # noqa: ANN401 - the file decides
        value = self.get(name)
        if value is None:
            raise FailedPreconditionError(f"it has no {name}")
        return value


def convert_gguf(path: Path) -> tuple[Tokenizer, TokenizerConfig]:
    """Reads the tokenizer of a GGUF file.

    Errors: FailedPreconditionError (not a GGUF, or without a tokenizer), UnimplementedError (a
    kind that is not built); both name the file.
    """
    try:
        return _convert(_Metadata(path))
    except (FailedPreconditionError, UnimplementedError) as error:
        raise type(error)(f"{path}: {error.message}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise FailedPreconditionError(f"{path} is not a readable GGUF file: {error}") from error


def _convert(metadata: _Metadata) -> tuple[Tokenizer, TokenizerConfig]:
    kind = metadata.require(f"{_PREFIX}model")
    if kind != "gpt2":
        raise UnimplementedError(f"its tokenizer type {kind!r} is not supported, only gpt2 (BPE)")
    tokens: list[str] = metadata.require(f"{_PREFIX}tokens")
    types: list[int] = metadata.get(f"{_PREFIX}token_type", [])
    tokenizer = _build(metadata, tokens)
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    return tokenizer, TokenizerConfig(
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=_special_tokens(metadata, tokens),
        add_bos_token=bool(metadata.get(f"{_PREFIX}add_bos_token", False)),
        add_eos_token=bool(metadata.get(f"{_PREFIX}add_eos_token", False)),
    )


def _build(metadata: _Metadata, tokens: list[str]) -> Tokenizer:
    pre = metadata.get(f"{_PREFIX}pre", "default")
    pairs = [tuple(merge.split(" ", 1)) for merge in metadata.require(f"{_PREFIX}merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=pairs, fuse_unk=False, ignore_merges=pre == "llama-bpe")
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, token_type in zip(tokens, types, strict=False)
        if token_type == kind
    ]


def _special_tokens(metadata: _Metadata, tokens: list[str]) -> dict[str, str]:
    ids = {
        name: metadata.get(f"{_PREFIX}{key}_token_id")
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
