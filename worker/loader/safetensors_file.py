"""Reads and writes safetensors files with plain reads.

The format: 8 bytes little-endian header length, a JSON header of name → {dtype, shape,
data_offsets}, then the data. The safetensors library maps the file instead, and mapped pages count
as resident memory beside the parameters they were copied to; a read straight into the parameter
does not.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from services.errors import InvalidArgumentError, NotFoundError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class SafetensorsFile:
    """An open file. Errors: NotFoundError, or InvalidArgumentError naming the corrupt file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise NotFoundError(f"cannot read model file {path}: {error.strerror}") from error
        try:
            self.metadata, self.entries = _read_header(self._file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._file.close()
            raise InvalidArgumentError(f"corrupt safetensors file {path}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_into(self, entry: TensorEntry, target: Tensor) -> None:
        """Reads one tensor into a contiguous tensor of the same shape, converting the dtype."""
        same = target.dtype == entry.dtype and target.is_contiguous()
        buffer = target if same else torch.empty(entry.shape, dtype=entry.dtype)
        self._file.seek(entry.offset)
        view = buffer.view(-1).view(torch.uint8).numpy().data
        while view:
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise InvalidArgumentError(f"corrupt safetensors file {self.path}: truncated")
            view = view[count:]
        if not same:
            target.copy_(buffer)


def _read_header(file: BinaryIO) -> tuple[dict[str, str], list[TensorEntry]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ValueError("its header does not fit the file")
    header = json.loads(file.read(length))
    metadata = header.pop(_METADATA, {})
    start = _LENGTH_BYTES + length
    entries = [_entry(name, fields, start, size) for name, fields in header.items()]
    return metadata, sorted(entries, key=lambda entry: entry.offset)


def _entry(name: str, fields: Mapping[str, object], start: int, size: int) -> TensorEntry:
    dtype = _DTYPES.get(str(fields["dtype"]))
    if dtype is None:
        raise ValueError(f"tensor {name} has the unsupported dtype {fields['dtype']}")
    shape = tuple(int(n) for n in fields["shape"])  # type: ignore[attr-defined]
    begin, end = (int(n) for n in fields["data_offsets"])  # type: ignore[attr-defined]
    expected = dtype.itemsize * torch.Size(shape).numel()
    if begin < 0 or end - begin != expected or start + end > size:
        raise ValueError(f"tensor {name} does not fit the file")
    return TensorEntry(name, dtype, shape, start + begin, expected)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterator[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Writes a file tensor by tensor, so that only one is in memory at a time.

    Args:
        path: where to write.
        shapes: of all tensors, in the order in which `tensors` gives them.
        dtype: of all of them.
        tensors: the data.
        metadata: free strings for the header.

    Errors: OSError.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)}
    offset = 0
    for name, shape in shapes.items():
        end = offset + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)  # the format wants the data aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little"))
        file.write(encoded)
        for _, tensor in tensors:
            file.write(tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
