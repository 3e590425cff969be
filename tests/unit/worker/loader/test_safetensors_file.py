"""Our reader and writer against the safetensors library, and against damaged files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.errors import InvalidArgumentError, NotFoundError
from worker.loader.safetensors_file import SafetensorsFile, write_safetensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.randn(4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c": torch.tensor(3.5, dtype=torch.float16),
}


def test_it_reads_what_the_library_writes_and_converts(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "m.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert {e.name for e in file.entries} == set(TENSORS)
        for entry in file.entries:
            for dtype in (torch.float32, torch.bfloat16):
                target = torch.empty(entry.shape, dtype=dtype)
                file.read_into(entry, target)
                assert torch.equal(target, TENSORS[entry.name].to(dtype))


def test_it_reads_into_a_slice_and_nothing_else(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "m.safetensors")
    merged = torch.full((4, 3), -1.0)
    with SafetensorsFile(tmp_path / "m.safetensors") as file:
        file.read_into(file.entries[0], merged[1:3])
    assert torch.equal(merged[1:3], TENSORS["a"])
    assert torch.equal(merged[[0, 3]], torch.full((2, 3), -1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_reads_what_it_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "m.safetensors"
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    write_safetensors(path, shapes, dtype, iter(TENSORS.items()), {"k": "v"})
    loaded = load_file(path)
    assert {n: t.tolist() for n, t in loaded.items()} == {
        n: t.to(dtype).tolist() for n, t in TENSORS.items()
    }


def _edit_header(path: Path, edit: Callable[[dict[str, dict[str, object]]], object]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: p.write_bytes(b""),
    "huge header": lambda p: p.write_bytes(b"\xff" * 64),
    "not JSON": lambda p: p.write_bytes((4).to_bytes(8, "little") + b"{{{{"),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "pickle": lambda p: p.write_bytes(b"\x80\x04" + b"0" * 100),
    "shape": lambda p: _edit_header(p, lambda h: h["a"].update(shape=[2, 4])),
    "dtype": lambda p: _edit_header(p, lambda h: h["a"].update(dtype="I64")),
    "offsets": lambda p: _edit_header(p, lambda h: h["a"].update(data_offsets=[-24, 0])),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": TENSORS["a"]}, path)
    damage(path)
    with pytest.raises(InvalidArgumentError, match=r"corrupt safetensors file .*m\.safetensors"):
        SafetensorsFile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere\.safetensors"):
        SafetensorsFile(tmp_path / "nowhere.safetensors")
