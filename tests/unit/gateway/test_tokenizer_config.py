import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tokenizer import Tokenizer
from gateway.tokenizer_config import (
    TokenizerConfig,
    add_named_tokens,
    apply_bos_eos,
    read_config,
)
from services.errors import FailedPreconditionError
from tests.fakes.tokenizer import byte_backend, byte_ids

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("bos", "eos", "ids"),
    [
        (False, False, [*byte_ids("hi")]),
        (True, False, [1, *byte_ids("hi")]),
        (False, True, [*byte_ids("hi"), 2]),
        (True, True, [1, *byte_ids("hi"), 2]),
    ],
)
def test_bos_and_eos_around_a_text(bos: bool, eos: bool, ids: list[int]) -> None:
    backend = byte_backend()
    apply_bos_eos(backend, TokenizerConfig(None, SPECIAL, bos, eos))
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("hi") == ids
    assert tokenizer.encode("hi", add_special_tokens=False) == byte_ids("hi")


def test_a_named_token_becomes_special() -> None:
    backend = byte_backend()
    add_named_tokens(backend, TokenizerConfig(None, {**SPECIAL, "pad_token": "<pad>"}))
    pad = backend.token_to_id("<pad>")
    assert pad is not None
    assert Tokenizer(backend).special_ids == {0, 1, 2, pad}


def test_json_round_trip() -> None:
    config = TokenizerConfig("{{ x }}", SPECIAL, True, False)
    assert TokenizerConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "5",
        "{",
        '{"chat_template": 5}',
        '{"chat_template": ["x"]}',
        '{"special_tokens": 5}',
        '{"special_tokens": {"bos_token": 5}}',
        '{"unknown": 1}',
    ],
)
def test_a_kept_form_that_is_not_ours_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        TokenizerConfig.from_json(text)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": {"default": "x"}}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 5}]}'),
        ("tokenizer_config.json", b'{"eos_token": {"lstrip": true}}'),
        ("tokenizer_config.json", b'{"eos_token": ["<|im_end|>"]}'),
        ("tokenizer_config.json", b'{"eos_token": "\xff"}'),
        ("special_tokens_map.json", b'{"bos_token": 7}'),
        ("special_tokens_map.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("chat_template.jinja", b"\xff\xfe{{ x }}"),
    ],
)
def test_a_models_odd_files_are_named(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(FailedPreconditionError) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("templates", "chosen"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        (["x", {"template": "t"}], None),
        ([], None),
    ],
)
def test_of_named_templates_the_default_counts(
    tmp_path: Path, templates: list[Any], chosen: str | None
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert read_config(tmp_path).chat_template == chosen
