"""What a tokenizer's files say beside its vocabulary."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from services.errors import FailedPreconditionError

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(slots=True, frozen=True)
class TokenizerConfig:
    """The settings of one tokenizer.

    Attributes:
        chat_template: Jinja text; None: the model has none.
        special_tokens: texts by name (`bos_token`, …).
        add_bos_token: put `bos_token` before a text. Only a conversion says so: a tokenizer.json
            has it in its post-processor, and transformers ignores the configuration's word then.
        add_eos_token: put `eos_token` after it, likewise.
    """

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos_token: bool = False
    add_eos_token: bool = False

    def to_json(self) -> str:
        """The form that the cache keeps."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TokenizerConfig":
        """Reads `to_json`'s form. Errors: ValueError, TypeError for any other text."""
        config = cls(**json.loads(text))
        if not isinstance(config.chat_template, str | None):
            raise TypeError("the chat template is not text")
        if not all(isinstance(token, str) for token in dict(config.special_tokens).values()):
            raise TypeError("a special token is not text")
        return config


def read_config(folder: Path) -> TokenizerConfig:
    """The settings in a Hugging Face model's folder; its files are all optional.

    Errors: FailedPreconditionError naming a file that is not what it should be.
    """
    config = _read_json(folder / "tokenizer_config.json")
    named = _read_json(folder / "special_tokens_map.json") | config
    special = {name: _text(named[name], name, folder) for name in _NAMED if named.get(name)}
    return TokenizerConfig(
        chat_template=_chat_template(folder, config),
        special_tokens=special,
    )


def apply_bos_eos(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Makes `encode` put the tokens around a text that the configuration asks for."""
    bos = config.special_tokens.get("bos_token") if config.add_bos_token else None
    eos = config.special_tokens.get("eos_token") if config.add_eos_token else None
    if not (bos or eos):
        return
    template = " ".join(part for part in (bos, "$A", eos) if part)
    special = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)


def add_named_tokens(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Makes the named special tokens special where the tokenizer's file does not."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = {text for text in config.special_tokens.values() if text not in known}
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in sorted(missing)]
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_template(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise FailedPreconditionError(
            f"{folder / 'tokenizer_config.json'}: chat_template is not text"
        )
    return template


def read_template(file: Path) -> str:
    """A file's Jinja text. Errors: FailedPreconditionError naming a file that is not text."""
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise FailedPreconditionError(f"{file} is not UTF-8 text") from error


def _text(token: object, name: str, folder: Path) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise FailedPreconditionError(f"{folder}: {name} in the tokenizer's files is not text")
    return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise FailedPreconditionError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FailedPreconditionError(f"{path} is not a JSON object")
    return content
