"""The worker's lease, cache and warm-up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from tests.unit.worker.tiny_models import SHAPE, loaded_worker, new_request, run, step_of
from worker.device import Device
from worker.worker import ModelSpec, Worker


@pytest.fixture
def fresh(tiny_llama: tuple[Path, Any], tmp_path: Path) -> Worker:
    return loaded_worker(tiny_llama[0], tmp_path)


def test_the_newest_epoch_wins(tmp_path: Path) -> None:
    worker = Worker(Device("cpu", has_native_bfloat16=False), tmp_path)
    with pytest.raises(FailedPreconditionError):
        worker.check_epoch(0)
    worker.take_lease("a", 5)
    worker.take_lease("b", 7)
    worker.check_epoch(7)
    with pytest.raises(FailedPreconditionError, match="epoch 5"):
        worker.check_epoch(5)
    with pytest.raises(FailedPreconditionError, match="the current one, 7"):
        worker.take_lease("c", 7)


def test_warming_up_writes_the_null_block_only(fresh: Worker) -> None:
    """An adopted request's keys and values must outlive the next enginecore's warm-up."""
    run(fresh.runner(), step_of(1, [new_request(1, [5, 6, 7, 8, 9], blocks=[1, 2])]))
    assert fresh.kv_cache is not None
    before = [layer.key[1:].clone() for layer in fresh.kv_cache.layers]
    assert fresh.warm_up() >= 0
    for layer, kept in zip(fresh.kv_cache.layers, before, strict=True):
        assert torch.equal(layer.key[1:], kept)
        assert bool(layer.key[0].any())
    assert fresh.runner().batch.row_of == {}


def test_a_cache_of_the_same_shape_is_kept_and_of_another_replaced(fresh: Worker) -> None:
    run(fresh.runner(), step_of(1, [new_request(1, [5, 6, 7], blocks=[1])]))
    fresh.end_stream()
    cache = fresh.kv_cache
    fresh.initialize_kv_cache(SHAPE)
    assert fresh.kv_cache is cache
    assert [held.request_id for held in fresh.held_requests()] == ["request-1"]
    fresh.initialize_kv_cache(replace(SHAPE, num_blocks=9))
    assert fresh.kv_cache is not cache
    assert fresh.held_requests() == []


def test_a_new_stream_takes_over_what_was_held(fresh: Worker) -> None:
    run(fresh.runner(), step_of(1, [new_request(1, [5, 6, 7], blocks=[1])]))
    fresh.end_stream()
    fresh.begin_stream()
    assert fresh.held_requests() == []


def test_sizes_that_cannot_be_are_refused(fresh: Worker) -> None:
    with pytest.raises(InvalidArgumentError, match="block_size"):
        fresh.initialize_kv_cache(replace(SHAPE, block_size=0))
    with pytest.raises(InvalidArgumentError, match="64 positions"):
        fresh.initialize_kv_cache(replace(SHAPE, max_model_len=65))
    with pytest.raises(ResourceExhaustedError, match="does not fit"):
        fresh.initialize_kv_cache(replace(SHAPE, num_blocks=2**40))


def test_a_model_that_does_not_fit_is_named(
    tiny_llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, torch says so by a plain RuntimeError; others are not taken for it."""
    worker = Worker(Device("cpu", has_native_bfloat16=False), tmp_path)
    spec = ModelSpec(str(tiny_llama[0]), torch.float32)

    def load() -> None:
        worker.load_model(spec, lambda _loaded, _total: None)

    monkeypatch.setattr("worker.worker.build_model", lambda *_: torch.empty(2**60))
    with pytest.raises(ResourceExhaustedError, match="does not fit into memory"):
        load()
    monkeypatch.setattr("worker.worker.build_model", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent"):
        load()
    assert worker.loaded is None
    monkeypatch.undo()
    load()


def test_one_worker_has_one_model(fresh: Worker, tiny_llama: tuple[Path, Any]) -> None:
    loaded = fresh.loaded
    spec = ModelSpec(str(tiny_llama[0]), torch.float32)
    assert fresh.load_model(spec, lambda _loaded, _total: None) is loaded
    with pytest.raises(FailedPreconditionError, match="another model is loaded"):
        fresh.load_model(replace(spec, seed=1), lambda _loaded, _total: None)
