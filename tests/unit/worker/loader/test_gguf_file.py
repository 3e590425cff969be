"""GGUF files written here from the tiny model, and the embedded model where it is at hand."""

import os
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from services.errors import InvalidArgumentError
from tests.unit.worker.tiny_models import save_llama
from worker.loader.conversion_cache import open_gguf
from worker.loader.gguf_file import GgufFile
from worker.loader.weights import load_into
from worker.models.registry import build_model

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order that llama.cpp's converter gives q and k rows: pairs side by side."""
    out = torch.empty_like(weight)
    size = weight.shape[0] // heads
    for row in range(weight.shape[0]):
        head, place = divmod(row, size)
        half, pair = divmod(place, size // 2)
        out[head * size + 2 * pair + half] = weight[row]
    return out


def write_gguf(path: Path, model: Any, **metadata: Any) -> None:
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    config = model.config
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    writer.add_token_list(["a", "b"])
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if ".q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        if ".k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        pieces = name.split(".")
        key = _NAMES.get(name) or f"blk.{pieces[2]}.{_NAMES['.'.join(pieces[3:-1])]}.weight"
        writer.add_tensor(metadata.get("rename", {}).get(key, key), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def loaded(source: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    targets = build_model(source.config, dtype).weight_targets()
    load_into(source, targets, lambda _loaded, _total: None)
    return targets


def test_a_gguf_file_is_the_model_it_was_made_from(tied: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tied)
    file = GgufFile(tmp_path / "m.gguf")
    config = file.config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 4)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (97, 24, 40)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (True, (2,))
    expected = tied.state_dict()
    for name, target in loaded(file).items():
        assert torch.equal(target, expected[name]), name


def test_the_second_start_reads_the_converted_copy(
    tied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, tied)
    first = open_gguf(path, torch.bfloat16, cache)
    assert [file.suffix for file in (cache / "converted").iterdir()] == [".safetensors"]
    monkeypatch.setattr("worker.loader.conversion_cache.GgufFile", None)
    second = open_gguf(path, torch.bfloat16, cache)
    assert second.config == first.config == GgufFile(path).config
    direct = loaded(GgufFile(path), torch.bfloat16)
    for name, target in loaded(second, torch.bfloat16).items():
        assert torch.equal(target, direct[name]), name


def test_a_copy_is_of_one_file_and_dtype(tied: Any, tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, tied)
    open_gguf(path, torch.bfloat16, cache)
    open_gguf(path, torch.float32, cache)
    later = time.time() + 5
    os.utime(path, (later, later))
    open_gguf(path, torch.float32, cache)
    assert len(list((cache / "converted").iterdir())) == 3


def test_a_corrupt_copy_is_replaced(
    tied: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, tied)
    open_gguf(path, torch.float32, cache)
    (copy,) = (cache / "converted").iterdir()
    good = copy.read_bytes()
    copy.write_bytes(good[: len(good) // 2])
    loaded(open_gguf(path, torch.float32, cache))
    assert "ignoring the converted copy" in caplog.text
    assert copy.read_bytes() == good


def test_without_a_cache_directory_the_file_itself_serves(
    tied: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "m.gguf", tied)
    (tmp_path / "file").write_text("in the way")
    source = open_gguf(tmp_path / "m.gguf", torch.float32, tmp_path / "file")
    assert isinstance(source, GgufFile)
    assert "cannot keep" in caplog.text
    loaded(source)


def test_what_is_not_supported_is_named(tied: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "arch.gguf", tied, architecture="mamba")
    with pytest.raises(InvalidArgumentError, match=r"arch\.gguf: .*mamba is not supported"):
        GgufFile(tmp_path / "arch.gguf")
    write_gguf(tmp_path / "odd.gguf", tied, rename={"blk.1.attn_v.weight": "blk.1.odd.weight"})
    with pytest.raises(InvalidArgumentError, match=r"odd\.gguf: .*blk\.1\.odd\.weight"):
        GgufFile(tmp_path / "odd.gguf")


def test_a_truncated_file_is_named(tied: Any, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    write_gguf(path, tied)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(InvalidArgumentError, match=r"corrupt GGUF file .*short\.gguf"):
        GgufFile(path)


def test_the_embedded_model_is_dequantised_and_put_in_order(embedded_model_path: Path) -> None:
    file = GgufFile(embedded_model_path)
    assert (file.config.num_layers, file.config.rope_theta) == (30, 100000.0)
    assert len(file.shapes()) == 272
    wanted = {"model.layers.3.self_attn.k_proj.weight", "model.norm.weight"}
    ours = {name: weight for name, weight in file.dequantised() if name in wanted}
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_model_path).tensors}
    key = raw["blk.3.attn_k.weight"]
    expected = gguf.quants.dequantize(key.data, key.tensor_type)
    k_proj = ours["model.layers.3.self_attn.k_proj.weight"]
    assert torch.equal(interleaved(k_proj, 3), torch.from_numpy(np.array(expected)))
    norm = raw["output_norm.weight"].data
    assert torch.equal(ours["model.norm.weight"], torch.from_numpy(np.array(norm)))
