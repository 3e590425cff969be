"""One tiny model for all tests of the worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.worker.tiny_models import loaded_worker, save_llama
from worker.worker import Worker


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Its directory, and the model itself as the oracle."""
    path = tmp_path_factory.mktemp("tiny-llama")
    return path, save_llama(path)


@pytest.fixture(scope="session")
def _tiny_worker(tiny_llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return loaded_worker(tiny_llama[0], tmp_path_factory.mktemp("cache"))


@pytest.fixture
def tiny_worker(_tiny_worker: Worker) -> Iterator[Worker]:
    """A worker with the tiny model, a cache, and an empty batch."""
    _tiny_worker.runner().reset()
    with torch.inference_mode():
        yield _tiny_worker
