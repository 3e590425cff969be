"""A byte-level tokenizer without merges: one token per byte, and three control tokens."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from gateway.tokenizer import BYTE_OF_CHAR

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_CONTROL = len(CONTROL_TOKENS)
EOS_ID = CONTROL_TOKENS.index("<|im_end|>")
VOCAB_SIZE = NUM_CONTROL + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    """The ids of a text, worked out by hand."""
    return [NUM_CONTROL + byte for byte in text.encode()]


def byte_backend() -> Tokenizer:
    """The tokenizer: control tokens are 0 to 2, byte b is 3 + b."""
    vocab = {text: i for i, text in enumerate(CONTROL_TOKENS)}
    vocab |= {char: NUM_CONTROL + byte for char, byte in BYTE_OF_CHAR.items()}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS]
    )
    return tokenizer


def write_byte_model(folder: Path) -> Path:
    """Writes the tokenizer as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_backend().save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
