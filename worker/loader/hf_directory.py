"""A Hugging Face directory: config.json and one or more safetensors files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.errors import InvalidArgumentError, NotFoundError
from worker.loader.safetensors_file import SafetensorsFile
from worker.loader.weights import WeightTargets, target_of
from worker.model_config import ModelConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# constants that old checkpoints store although they follow from the configuration
_DERIVED_SUFFIX = "rotary_emb.inv_freq"


class HfDirectory:
    """A local directory as `save_pretrained` writes it.

    Errors: NotFoundError for a missing file, InvalidArgumentError for a corrupt one; both name it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = read_hf_config(path)
        self._files = self._weight_files()

    def tensors(self, targets: WeightTargets) -> Iterator[str]:
        """Reads file after file straight into the targets."""
        for path in self._files:
            with SafetensorsFile(path) as file:
                for entry in file.entries:
                    if self._is_derived(entry.name):
                        continue
                    target = target_of(targets, entry.name, entry.shape, str(path))
                    file.read_into(entry, target)
                    yield entry.name

    def _is_derived(self, name: str) -> bool:
        tied_copy = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_copy or name.endswith(_DERIVED_SUFFIX)

    def _weight_files(self) -> list[Path]:
        if (self._path / _INDEX).exists():
            weight_map = _read_json(self._path / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise InvalidArgumentError(
                    f"corrupt model file {self._path / _INDEX}: no weight_map"
                )
            # only the base name: an index must not lead out of its directory
            return [self._path / Path(str(name)).name for name in sorted(set(weight_map.values()))]
        if not (self._path / _SINGLE).exists():
            raise NotFoundError(
                f"no {_SINGLE} or {_INDEX} in {self._path}; pickled weights are not read"
            )
        return [self._path / _SINGLE]


def read_hf_config(path: Path) -> ModelConfig:
    """Reads a directory's configuration. Errors: NotFoundError, InvalidArgumentError."""
    if not (path / "config.json").exists():
        raise NotFoundError(f"no config.json in {path}")
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        return ModelConfig.from_hf(_read_json(path / "config.json"), generation)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"corrupt model file {path}: not JSON") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"corrupt model file {path}: not a JSON object")
    return value
