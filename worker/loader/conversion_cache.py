"""Converted copies of GGUF files, so that only the first start pays for parsing and dequantising.

A copy is one safetensors file whose metadata holds the ModelConfig. Its name tells the source
file's name, size and modification time, the dtype and this format's version: anything else makes a
new copy. It is written beside its place and renamed, so that a copy is whole or absent. A copy that
cannot be read is ignored, and replaced.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from services.errors import ServiceError
from worker.loader.gguf_file import GgufFile
from worker.loader.safetensors_file import SafetensorsFile, write_safetensors
from worker.loader.weights import WeightSource, WeightTargets, target_of
from worker.model_config import ModelConfig

log = logging.getLogger(__name__)

_FORMAT_VERSION = 1
_CONFIG_KEY = "seamline_model_config"


class ConvertedFile:
    """A cached copy. Errors: ServiceError, KeyError, TypeError or ValueError if unusable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with SafetensorsFile(path) as file:
            self.config = ModelConfig.from_json(file.metadata[_CONFIG_KEY])

    def tensors(self, targets: WeightTargets) -> Iterator[str]:
        """Reads tensor after tensor straight into the targets."""
        with SafetensorsFile(self._path) as file:
            for entry in file.entries:
                target = target_of(targets, entry.name, entry.shape, str(self._path))
                file.read_into(entry, target)
                yield entry.name


def open_gguf(path: Path, dtype: torch.dtype, cache_dir: Path) -> WeightSource:
    """Opens the converted copy of a GGUF file, making it first if need be.

    Without a writable cache directory the GGUF file itself is the source.
    Errors: InvalidArgumentError naming a corrupt or unsupported GGUF file.
    """
    copy = _copy_path(path, dtype, cache_dir)
    converted = _open_copy(copy)
    if converted is not None:
        return converted
    gguf = GgufFile(path)
    try:
        _write_copy(gguf, copy, dtype)
    except OSError as error:
        log.warning("cannot keep a converted copy of the model: %s", error)
        return gguf
    return _open_copy(copy) or gguf


def _copy_path(path: Path, dtype: torch.dtype, cache_dir: Path) -> Path:
    stat = path.stat()
    kind = str(dtype).removeprefix("torch.")
    name = f"{path.stem}-{stat.st_size}-{stat.st_mtime_ns}-{kind}-v{_FORMAT_VERSION}.safetensors"
    return cache_dir / "converted" / name


def _open_copy(copy: Path) -> ConvertedFile | None:
    if not copy.exists():
        return None
    try:
        return ConvertedFile(copy)
    except (ServiceError, KeyError, TypeError, ValueError) as error:
        log.warning("ignoring the converted copy %s: %s", copy, error)
        return None


def _write_copy(gguf: GgufFile, copy: Path, dtype: torch.dtype) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    partial = copy.with_name(f"{copy.name}.{os.getpid()}.partial")
    try:
        metadata = {_CONFIG_KEY: gguf.config.to_json()}
        write_safetensors(partial, gguf.shapes(), dtype, gguf.dequantised(), metadata)
        partial.replace(copy)
    finally:
        partial.unlink(missing_ok=True)
