"""Finds and loads a model's tokenizer: a GGUF file, a Hugging Face folder, or a hub id.

Converting a GGUF takes seconds, so the result is kept in a cache folder under a name made of the
file's name, size and modification time. A cache entry that cannot be read is made again.
"""

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Backend

from gateway.gguf_tokenizer import convert_gguf
from gateway.tokenizer import Tokenizer
from gateway.tokenizer_config import (
    TokenizerConfig,
    add_named_tokens,
    apply_bos_eos,
    read_config,
)
from services.errors import FailedPreconditionError, NotFoundError

log = logging.getLogger(__name__)

CACHE_VERSION: Final = 1
"""Part of the cache's names; grows when the conversion changes."""
_GGUF_MAGIC: Final = b"GGUF"
_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(slots=True, frozen=True)
class LoadedTokenizer:
    """A tokenizer and what its files say beside it."""

    tokenizer: Tokenizer
    config: TokenizerConfig


def load_tokenizer(source: str, cache_dir: Path) -> LoadedTokenizer:
    """Loads a tokenizer.

    Args:
        source: a GGUF file, a folder with tokenizer.json, or a hub id (`owner/name`).
        cache_dir: where converted tokenizers are kept; need not exist or be writable.

    Errors: NotFoundError, FailedPreconditionError or UnimplementedError; each names the file.
    """
    path = Path(source).expanduser()
    if path.is_file():
        backend, config = _from_gguf(path, cache_dir)
    elif path.is_dir():
        backend, config = _from_folder(path)
    else:
        backend, config = _from_folder(_download(source))
    add_named_tokens(backend, config)
    apply_bos_eos(backend, config)
    return LoadedTokenizer(Tokenizer(backend), config)


def _from_folder(folder: Path) -> tuple[Backend, TokenizerConfig]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise NotFoundError(f"{folder} has no tokenizer.json")
    return _read_backend(file), read_config(folder)


def _read_backend(file: Path) -> Backend:
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise FailedPreconditionError(f"{file} is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _download(repo_id: str) -> Path:
    # imported here: it brings an HTTP stack that a local model needs not
    from huggingface_hub import snapshot_download

    if repo_id.startswith((".", "/", "~")) or repo_id.count("/") > 1:
        raise NotFoundError(f"no such model file or folder: {repo_id}")
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_FILES)))
    except (OSError, ValueError, RuntimeError) as error:
        raise NotFoundError(
            f"{repo_id} is neither a file nor a folder, and its tokenizer cannot be downloaded"
        ) from error


def _from_gguf(path: Path, cache_dir: Path) -> tuple[Backend, TokenizerConfig]:
    with path.open("rb") as file:
        if file.read(4) != _GGUF_MAGIC:
            raise FailedPreconditionError(f"{path} is not a GGUF file")
    entry = _cache_entry(path, cache_dir)
    cached = _read_cache(entry)
    if cached is not None:
        return cached
    log.info("converting the tokenizer of %s", path.name)
    converted = convert_gguf(path)
    _write_cache(entry, *converted)
    return converted


def _cache_entry(path: Path, cache_dir: Path) -> Path:
    stat = path.stat()
    key = f"{CACHE_VERSION}:{path.name}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_dir.expanduser() / "tokenizers" / f"{path.stem}-{digest}"


def _read_cache(entry: Path) -> tuple[Backend, TokenizerConfig] | None:
    if not entry.is_dir():
        return None
    try:
        config = TokenizerConfig.from_json((entry / "config.json").read_text())
        return _read_backend(entry / "tokenizer.json"), config
    except (OSError, ValueError, TypeError, FailedPreconditionError):
        log.warning("the cached tokenizer %s cannot be read and is made again", entry)
        return None


def _write_cache(entry: Path, backend: Backend, config: TokenizerConfig) -> None:
    """Keeps a conversion, whole or not at all; a folder that cannot be written costs only time."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
            fresh = Path(scratch) / "entry"
            fresh.mkdir()
            backend.save(str(fresh / "tokenizer.json"), pretty=False)
            (fresh / "config.json").write_text(config.to_json())
            if entry.exists():
                os.rename(entry, Path(scratch) / "old")
            os.rename(fresh, entry)
    except OSError as error:
        log.warning("the converted tokenizer cannot be kept in %s: %s", entry.parent, error)
