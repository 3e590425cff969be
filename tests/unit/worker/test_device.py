"""Facts of the device."""

from pathlib import Path

import pytest
import torch

from services.errors import InvalidArgumentError
from worker import cpu_topology, device
from worker.device import Device, open_device


@pytest.mark.parametrize(
    ("native", "name", "dtype"),
    [
        (True, "auto", torch.bfloat16),
        (False, "auto", torch.float32),
        (False, "", torch.float32),
        (False, "bfloat16", torch.bfloat16),
        (True, "float32", torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_that_is_native(
    native: bool, name: str, dtype: torch.dtype
) -> None:
    assert Device("cpu", has_native_bfloat16=native).resolve_dtype(name) == dtype


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="int8"):
        Device("cpu", has_native_bfloat16=True).resolve_dtype("int8")
    with pytest.raises(InvalidArgumentError, match="tpu"):
        open_device("tpu", num_threads=1)


def test_a_container_limit_bounds_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    cpu = Device("cpu", has_native_bfloat16=False)
    unlimited = cpu.available_bytes()
    assert unlimited > 2**20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    assert cpu.available_bytes() > 2**20
    (tmp_path / "memory.max").write_text("1000\n")
    assert cpu.available_bytes() == 400


def test_hardware_threads_of_a_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        (tmp_path / str(cpu)).write_text(siblings)
    monkeypatch.setattr(cpu_topology, "_SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(cpu_topology, "_CPU_QUOTA", tmp_path / "quota")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cpu_topology.default_num_threads() == 2
    (tmp_path / "quota").write_text("100000 100000")
    assert cpu_topology.default_num_threads() == 1
    (tmp_path / "quota").write_text("max 100000")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2})
    assert cpu_topology.default_num_threads() == 1
