"""What model names mean, and what goes wrong with their files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.errors import InvalidArgumentError, NotFoundError, ServiceError
from worker.loader import model_source
from worker.loader.model_source import open_model
from worker.loader.weights import WeightSource, load_into
from worker.models.registry import build_model


def open_it(model: str | Path, **fields: Any) -> WeightSource:
    given: dict[str, Any] = {
        "dtype": torch.float32,
        "load_format": "auto",
        "revision": None,
        "seed": 0,
        "cache_dir": Path("unused"),
    }
    return open_model(str(model), **(given | fields))


def filled(source: WeightSource) -> dict[str, torch.Tensor]:
    model = build_model(source.config, torch.float32)
    targets = model.weight_targets()
    load_into(source, targets, lambda _loaded, _total: None)
    return targets


@pytest.fixture
def copy(tiny_llama: tuple[Path, Any], tmp_path: Path) -> Path:
    """The tiny model's directory, to be damaged."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in tiny_llama[0].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def edit_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def edit_weights(path: Path, **tensors: torch.Tensor | None) -> None:
    weights = load_file(path / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def test_every_tensor_arrives_bit_by_bit(tiny_llama: tuple[Path, Any]) -> None:
    targets = filled(open_it(tiny_llama[0]))
    expected = tiny_llama[1].state_dict()
    assert set(targets) == set(expected)
    for name, target in targets.items():
        assert torch.equal(target, expected[name]), name


def test_a_sharded_directory_is_the_same_model(
    tiny_llama: tuple[Path, Any], tmp_path: Path
) -> None:
    tiny_llama[1].save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    targets, expected = filled(open_it(tmp_path / "sharded")), filled(open_it(tiny_llama[0]))
    assert all(torch.equal(targets[name], expected[name]) for name in expected)


def test_progress_reaches_the_total(tiny_llama: tuple[Path, Any]) -> None:
    source = open_it(tiny_llama[0])
    seen: list[tuple[int, int]] = []
    targets = build_model(source.config, torch.float32).weight_targets()
    load_into(source, targets, lambda loaded, total: seen.append((loaded, total)))
    assert len(seen) == len(targets)
    assert [loaded for loaded, _ in seen] == sorted({loaded for loaded, _ in seen})
    assert seen[-1] == (sum(t.nbytes for t in targets.values()),) * 2


def test_dummy_weights_are_a_function_of_the_seed(tiny_llama: tuple[Path, Any]) -> None:
    a, b, other = (
        filled(open_it(tiny_llama[0], load_format="dummy", seed=seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(a["model.norm.weight"], torch.ones(24))


def test_a_tied_model_ignores_a_copy_of_the_output_matrix(copy: Path) -> None:
    edit_config(copy, tie_word_embeddings=True)
    assert "lm_head.weight" not in filled(open_it(copy))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"model.norm.weight": None}, "lack the tensor model.norm.weight"),
        ({"model.norm.weight": torch.ones(25)}, r"model.norm.weight has shape \(25,\)"),
        ({"model.odd.weight": torch.ones(2)}, "no place for the tensor model.odd.weight"),
        ({"model.norm.weight": torch.ones(24, dtype=torch.int32)}, "unsupported dtype I32"),
    ],
    ids=["missing", "shape", "unknown", "dtype"],
)
def test_what_is_wrong_with_a_tensor_is_named(
    copy: Path, tensors: dict[str, torch.Tensor | None], text: str
) -> None:
    edit_weights(copy, **tensors)
    with pytest.raises(InvalidArgumentError, match=text):
        filled(open_it(copy))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"architectures": ["GrandForCausalLM"]}, "GrandForCausalLM is not supported"),
        ({"architectures": []}, "no single architecture"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_size": "many"}, "malformed"),
        ({"sliding_window": 512}, "sliding-window"),
        ({"architectures": 5}, "no single architecture"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
        ({"rope_parameters": [1]}, "malformed"),
        ({"rope_parameters": "linear"}, "malformed"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_attention_heads": 0}, "malformed"),
        ({"num_attention_heads": -4}, "num_heads"),
        ({"num_key_value_heads": 5}, "key-value heads"),
        ({"head_dim": 3}, "odd"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
        ({"num_hidden_layers": 5000}, "num_layers"),
        ({"vocab_size": 10**10}, "vocab_size"),
        ({"hidden_size": float("inf")}, "malformed"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(
    copy: Path, fields: dict[str, object], text: str
) -> None:
    edit_config(copy, **fields)
    with pytest.raises(InvalidArgumentError, match=text):
        filled(open_it(copy))


def test_a_missing_key_is_named(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["intermediate_size"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgumentError, match="lacks intermediate_size"):
        open_it(copy)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(10**6, "end-of-sequence"), ([-1], "end-of-sequence"), ("x", "malformed"), (1.5, "malformed")],
)
def test_an_end_of_sequence_token_that_is_none_is_named(
    copy: Path, tokens: object, text: str
) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    with pytest.raises(InvalidArgumentError, match=text):
        open_it(copy)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b""])
def test_a_file_that_is_not_a_json_object_is_named(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=name):
        open_it(copy)


def test_pickled_weights_are_not_read(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(NotFoundError, match="pickled weights are not read"):
        open_it(copy)


def test_an_index_cannot_lead_out_of_its_directory(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NotFoundError, match=r"copy/model\.safetensors"):
        filled(open_it(copy))


@pytest.mark.parametrize("name", ["/no/such/dir", "./no-such", "no-such.gguf", "a/b/c", "a b"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(NotFoundError, match="no such model file"):
        open_it(name)


def test_a_hub_id_comes_from_the_hub(
    tiny_llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, **fields: Any) -> str:
        asked.update(fields, model=model)
        return str(tiny_llama[0])

    monkeypatch.setattr(model_source, "snapshot_download", download)
    assert open_it("someone/tiny", revision="v1").config.vocab_size == 97
    assert (asked["model"], asked["revision"]) == ("someone/tiny", "v1")
    assert asked["allow_patterns"] == ["*.json", "*.safetensors"]


def test_a_hub_id_without_a_network_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(model_source, "snapshot_download", download)
    with pytest.raises(NotFoundError, match="someone/tiny"):
        open_it("someone/tiny")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 200, b"PK\x03\x04zip"])
def test_a_corrupt_gguf_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"corrupt .*broken\.gguf"):
        open_it(path, cache_dir=tmp_path)


def test_an_unknown_load_format_is_refused(tiny_llama: tuple[Path, Any]) -> None:
    with pytest.raises(ServiceError, match="load_format pickle"):
        open_it(tiny_llama[0], load_format="pickle")
