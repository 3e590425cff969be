"""How many threads this process should compute with. Imports nothing: it is asked before torch."""

import os
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_num_threads() -> int:
    """Physical cores that this process may run on, and may use up by its container's quota."""
    cpus = os.sched_getaffinity(0)
    cores = {_core_of(cpu) for cpu in cpus}
    quota = _quota_cpus()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _core_of(cpu: int) -> str:
    """Names the core; hardware threads of one core give the same name."""
    try:
        return Path(_SIBLINGS.format(cpu)).read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cpus() -> float | None:
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def configure_openmp(num_threads: int | None) -> None:
    """Sets what OpenMP reads when torch is imported; so it must come before that.

    Args:
        num_threads: threads of an operation; None: `default_num_threads()`.
    """
    # spinning threads would starve the other processes
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(num_threads or default_num_threads())
