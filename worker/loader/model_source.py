"""Finds out what a model name means: a GGUF file, a local directory, or a hub id."""

import re
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from services.errors import InvalidArgumentError, NotFoundError
from worker.loader.conversion_cache import open_gguf
from worker.loader.dummy import DummySource
from worker.loader.gguf_file import GgufFile
from worker.loader.hf_directory import HfDirectory, read_hf_config
from worker.loader.weights import WeightSource

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors"]
_LOAD_FORMATS = ("auto", "dummy")


def open_model(
    model: str,
    *,
    dtype: torch.dtype,
    load_format: str,
    revision: str | None,
    seed: int,
    cache_dir: Path,
) -> WeightSource:
    """Opens a model's files.

    Args:
        model: a GGUF file, a directory with config.json and safetensors, or a hub id.
        dtype: what the weights will be; decides which converted copy of a GGUF file is used.
        load_format: "auto", or "dummy" for random weights of the same shape.
        revision: branch, tag or commit of a hub id; None: its default.
        seed: of dummy weights.
        cache_dir: where converted copies of GGUF files are kept.

    Errors: NotFoundError when there is no such file, directory or hub model (or no network);
    InvalidArgumentError naming what is corrupt or not supported.
    """
    if load_format not in _LOAD_FORMATS:
        raise InvalidArgumentError(
            f"load_format {load_format} is not supported: use auto or dummy", param="load_format"
        )
    path = _local_path(model, revision)
    if path.is_dir():
        if load_format == "dummy":
            return DummySource(read_hf_config(path), seed)
        return HfDirectory(path)
    if load_format == "dummy":
        return DummySource(GgufFile(path).config, seed)
    return open_gguf(path, dtype, cache_dir)


def _local_path(model: str, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        return path
    looks_like_a_path = model.startswith((".", "/", "~")) or path.suffix == ".gguf"
    if looks_like_a_path or not _HUB_ID.fullmatch(model):
        raise NotFoundError(f"no such model file or directory: {model}", param="model")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise NotFoundError(
            f"model {model} is neither a local path nor to be had from the hub"
            f" ({type(error).__name__})",
            param="model",
        ) from error
