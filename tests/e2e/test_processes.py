"""What the processes of a running stack are made of."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bench.launched_stack import LaunchedStack, free_port

MIB = 2**20
PROMISED_FLAGS = (
    *("model", "served-model-name", "dtype", "max-model-len", "max-num-seqs", "seed"),
    *("max-num-batched-tokens", "block-size", "gpu-memory-utilization", "enforce-eager"),
    *("kv-cache-memory-bytes", "num-gpu-blocks-override", "enable-prefix-caching"),
    *("host", "port", "api-key", "single-process"),
)


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_only_the_worker_loads_torch(stack: LaunchedStack) -> None:
    loaded = {name: mapped_files(process.pid) for name, process in stack.services().items()}
    assert "libtorch" in loaded["worker"]
    assert "libtorch" not in loaded["gateway"]
    assert "libtorch" not in loaded["enginecore"]


def test_memory_stays_in_its_budget(stack: LaunchedStack) -> None:
    resident = {name: cost.resident_bytes for name, cost in stack.costs().items()}
    assert resident["gateway"] + resident["enginecore"] < 500 * MIB
    assert sum(resident.values()) < 1500 * MIB, resident


def test_the_api_key_is_in_no_command_line(
    embedded_model_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    env = {"SEAMLINE_CACHE_DIR": str(cache_dir), "SEAMLINE_API_KEY": "sesame-3141"}
    with LaunchedStack(env=env, log_path=tmp_path / "log") as stack:
        commands = [" ".join(p.cmdline()) for p in stack.services().values()]
        url = f"{stack.base_url}/v1/models"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"authorization": "Bearer sesame-3141"}).status_code == 200
    assert not any("sesame" in command for command in commands)
    assert "sesame" not in (tmp_path / "log").read_text()


def test_it_serves_and_stops_while_the_collector_is_away(
    embedded_model_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    env = {
        "SEAMLINE_CACHE_DIR": str(cache_dir),
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with LaunchedStack(env=env, log_path=tmp_path / "log") as stack:
        processes = list(stack.services().values())
        for _ in range(3):
            body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
            answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["text"] == " Paris"
        assert stack.stop() == 0
    assert not any(process.is_running() for process in processes)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("kind", ["missing", "corrupt", "directory"])
def test_a_bad_model_is_one_clear_failure(kind: str, tmp_path: Path) -> None:
    model = tmp_path / f"{kind}.gguf"
    if kind == "corrupt":
        model.write_bytes(b"GGUF" + b"\xff" * 1000)
    if kind == "directory":
        model = tmp_path / "empty"
        model.mkdir()
    done = serve_until_exit("--model", str(model))
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if model.name in line]
    assert errors
    assert "Traceback" not in done.stderr
    assert "Seamline is ready" not in done.stdout


def serve_until_exit(*flags: str) -> subprocess.CompletedProcess[str]:
    ports = ("--port", str(free_port()), "--listen-address", f"127.0.0.1:{free_port()}")
    command = [sys.executable, "-m", "services.cli", "serve", *ports, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_explains_every_flag() -> None:
    done = serve_until_exit("--help")
    assert done.returncode == 0
    for flag in PROMISED_FLAGS:
        assert f"--{flag}" in done.stdout


def test_a_flag_out_of_range_is_named() -> None:
    done = serve_until_exit("--max-num-seqs", "0")
    assert done.returncode == 1
    assert "--max-num-seqs" in done.stderr


def test_each_service_waits_for_the_others(
    embedded_model_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Started alone and in the wrong order they find each other."""
    port, rpc = free_port(), free_port()
    sockets = {name: f"unix:{tmp_path}/{name}" for name in ("worker", "enginecore")}
    model = ("--model", str(embedded_model_path))
    flags = {
        "gateway": (
            *model,
            *("--port", str(port), "--listen-address", f"127.0.0.1:{rpc}"),
            *("--enginecore-address", sockets["enginecore"]),
        ),
        "enginecore": (
            *model,
            *("--listen-address", sockets["enginecore"], "--worker-address", sockets["worker"]),
        ),
        "worker": ("--listen-address", sockets["worker"]),
    }
    env = {**os.environ, "SEAMLINE_CACHE_DIR": str(cache_dir)}
    processes = []
    try:
        for name, arguments in flags.items():
            command = [sys.executable, "-m", name, *arguments]
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
            time.sleep(1.0)
        wait_for_status(f"http://127.0.0.1:{port}/ready", 200)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        statuses = [process.wait(30) for process in processes]
    assert statuses == [0, 0, 0]


def wait_for_status(url: str, status: int, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(url).status_code == status:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_single_process_serves_the_same(
    embedded_model_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    env = {"SEAMLINE_CACHE_DIR": str(cache_dir)}
    with LaunchedStack(("--single-process",), env=env, log_path=tmp_path / "log") as stack:
        assert stack.services() == {}
        body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == " Paris"
        assert stack.stop() == 0
