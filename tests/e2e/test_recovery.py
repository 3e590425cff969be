"""A process dies in the middle of an answer, and the client sees a pause."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI, OpenAIError

from bench.launched_stack import LaunchedStack
from tests.e2e.conftest import MODEL


@pytest.fixture(scope="module")
def own_stack(
    embedded_model_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedStack]:
    log = tmp_path_factory.mktemp("recovery") / "log"
    flags = ("--dtype", "float32")
    with LaunchedStack(flags, env={"SEAMLINE_CACHE_DIR": str(cache_dir)}, log_path=log) as stack:
        yield stack


def stream(stack: LaunchedStack) -> Iterator[str]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as client:
        for chunk in client.completions.create(
            model=MODEL,
            prompt="Here is a long list of animals:",
            max_tokens=60,
            seed=11,
            temperature=0.8,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            yield chunk.choices[0].text


@pytest.mark.parametrize("victim", ["worker", "enginecore"])
def test_a_killed_process_costs_a_pause(own_stack: LaunchedStack, victim: str) -> None:
    undisturbed = "".join(stream(own_stack))
    process = own_stack.services()[victim]
    text = ""
    for index, piece in enumerate(stream(own_stack)):
        text += piece
        if index == 5:
            os.kill(process.pid, signal.SIGKILL)
    assert text == undisturbed
    assert own_stack.services()[victim].pid != process.pid


def test_a_killed_gateway_comes_back(own_stack: LaunchedStack) -> None:
    os.kill(own_stack.services()["gateway"].pid, signal.SIGKILL)
    with OpenAI(base_url=f"{own_stack.base_url}/v1", api_key="x", max_retries=0) as client:
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = client.completions.create(model=MODEL, prompt="One two", max_tokens=2)
                break
            except OpenAIError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_no_service_outlives_a_killed_launcher(
    embedded_model_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    env = {"SEAMLINE_CACHE_DIR": str(cache_dir)}
    with LaunchedStack(env=env, log_path=tmp_path / "log") as stack:
        children = list(stack.services().values())
        assert len(children) == 3
        assert stack.process is not None
        stack.process.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
