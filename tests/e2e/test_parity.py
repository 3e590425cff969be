"""Greedy output equals Hugging Face's `generate` on the same weights in fp32, token for token."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.launched_stack import LaunchedStack
from seamline.common.v1 import sampling_pb2
from seamline.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.operations import sample

pytestmark = pytest.mark.timeout(900)

PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 257, 350, 512, 600)
NUM_OUTPUT_TOKENS = 16


@pytest.fixture(scope="module")
def prompts(embedded_model_path: Path) -> list[list[int]]:
    """English of exact lengths, each on a topic of its own."""
    tokenizer = AutoTokenizer.from_pretrained(
        embedded_model_path.parent, gguf_file=embedded_model_path.name
    )
    texts = [re.sub(r"\s+", " ", topics[name]) for name in sorted(topics)]
    encoded = [tokenizer(text).input_ids for text in texts if len(text) > 4_000]
    return [encoded[i][5 : 5 + length] for i, length in enumerate(PROMPT_LENGTHS)]


@pytest.fixture(scope="module")
def expected(embedded_model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, one prompt at a time, from its own reading of the file."""
    torch.set_num_threads(1)  # beside the stack's own threads, two are slower than one
    model = AutoModelForCausalLM.from_pretrained(
        embedded_model_path.parent, gguf_file=embedded_model_path.name, dtype=torch.float32
    )
    outputs = []
    for prompt in prompts:
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_OUTPUT_TOKENS,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=2,
            )
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def small_stack(
    embedded_model_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedStack]:
    """A KV cache of 52 blocks: the prompts exceed it three times, and the first 16 of them, which
    take 49, need one more each while they decode."""
    folder = tmp_path_factory.mktemp("small")
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "53", "--max-model-len", "800")
    env = {"SEAMLINE_CACHE_DIR": str(cache_dir)}
    with LaunchedStack(flags, env=env, log_path=folder / "log") as running:
        yield running


def generate(stack: LaunchedStack, prompts: list[list[int]], at_once: int) -> list[list[int]]:
    with (
        grpc.insecure_channel(stack.grpc_address) as channel,
        ThreadPoolExecutor(at_once) as threads,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        def one(prompt: list[int]) -> list[int]:
            sampling = sampling_pb2.SamplingParams(
                temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True
            )
            request = gateway_pb2.GenerateInput(
                token_ids=gateway_pb2.TokenIds(ids=prompt), sampling_params=sampling
            )
            answer = stub.Generate(gateway_pb2.GenerateRequest(input=request))
            return list(answer.choices[0].token_ids)

        return list(threads.map(one, prompts))


def test_one_at_a_time(
    stack: LaunchedStack, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert generate(stack, prompts, at_once=1) == expected


def test_all_at_once(
    stack: LaunchedStack, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert generate(stack, prompts, at_once=len(prompts)) == expected


def test_with_preemptions(
    small_stack: LaunchedStack, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert generate(small_stack, prompts, at_once=len(prompts)) == expected
    assert sample(small_stack, "vllm:num_preemptions_total") > 0
