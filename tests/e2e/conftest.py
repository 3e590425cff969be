from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from openai import AsyncOpenAI, OpenAI

from bench.launched_stack import LaunchedStack
from tests.otlp_receiver import OtlpReceiver

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="session")
def stack(
    embedded_model_path: Path,
    cache_dir: Path,
    receiver: OtlpReceiver,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LaunchedStack]:
    """The whole stack as `make serve` starts it, in fp32, tracing into `receiver`."""
    folder = tmp_path_factory.mktemp("stack")
    env = {
        "SEAMLINE_CACHE_DIR": str(cache_dir),
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with LaunchedStack(("--dtype", "float32"), env=env, log_path=folder / "log") as running:
        yield running


@pytest.fixture
def client(stack: LaunchedStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as openai:
        yield openai


@pytest.fixture
async def async_client(stack: LaunchedStack) -> AsyncIterator[AsyncOpenAI]:
    url = f"{stack.base_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
        yield openai


@pytest.fixture
def gateway_channel(stack: LaunchedStack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        yield channel
