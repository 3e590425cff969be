"""What there is to know of the device before anything runs on it."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from services.errors import InvalidArgumentError
from worker.attention.backend import AttentionBackend
from worker.attention.cpu import CpuAttention
from worker.loader.weights import FLOAT_DTYPES

_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Device:
    """One device."""

    name: str
    """"cpu"."""
    has_native_bfloat16: bool
    """It multiplies bfloat16 without converting to float32 first."""

    def resolve_dtype(self, name: str) -> torch.dtype:
        """The dtype of a name; "auto" or "" is bfloat16 where that is native, float32 elsewhere.

        Errors: InvalidArgumentError for another name.
        """
        if name in ("", "auto"):
            return torch.bfloat16 if self.has_native_bfloat16 else torch.float32
        if name not in FLOAT_DTYPES:
            names = ", ".join(["auto", *FLOAT_DTYPES])
            raise InvalidArgumentError(f"dtype {name} is not one of {names}", param="dtype")
        return FLOAT_DTYPES[name]

    def available_bytes(self) -> int:
        """Memory that this process could still take, within its container's limit."""
        free = _meminfo_available()
        limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
        return free if limit is None or used is None else max(0, min(free, limit - used))

    def attention_backend(self) -> AttentionBackend:
        """A new attention backend for it."""
        return CpuAttention()


def open_device(name: str, *, num_threads: int) -> Device:
    """Makes a device ready.

    Args:
        name: "auto" or "cpu".
        num_threads: for torch's operations.

    Errors: InvalidArgumentError for a device that there is no code for.
    """
    if name not in ("auto", "cpu"):
        raise InvalidArgumentError(f"device {name} is not supported", param="device")
    torch.set_num_threads(num_threads)
    return Device(name="cpu", has_native_bfloat16=_cpu_has_bfloat16())


def _cpu_has_bfloat16() -> bool:
    """Reads the kernel's list: x86 dot products and tiles, or Arm's bf16 extension."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags: set[str] = set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags.update(value.split())
    return any(flag in flags for flag in _BF16_FLAGS)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None
