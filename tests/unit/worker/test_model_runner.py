"""The model runner against transformers, and its failures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import FailedPreconditionError, InvalidArgumentError
from tests.unit.worker.tiny_models import (
    GREEDY,
    SHAPE,
    VOCAB_SIZE,
    cached,
    loaded_worker,
    new_request,
    run,
    save_llama,
    save_mistral,
    step_of,
    tokens_of,
)
from worker.model_runner import ModelRunner
from worker.sampling_params import SamplingParams
from worker.step import StepInput
from worker.worker import Worker

PROMPT = [5, 17, 3, 88, 41, 60, 9, 12, 77, 30, 2, 51, 64]


def oracle_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of `tokens`, from transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits
        return logits[0, -1].float()


def logits_after(runner: ModelRunner, step: StepInput) -> torch.Tensor:
    runner.execute_model(step)
    assert runner._pending is not None
    logits = runner._pending.logits.clone()
    runner.sample_tokens()
    return logits


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_prefill_gives_the_logits_of_transformers(
    tiny_worker: Worker, tiny_llama: tuple[Path, Any]
) -> None:
    step = step_of(1, [new_request(1, PROMPT, blocks=[7, 3, 9, 1])])
    logits = logits_after(tiny_worker.runner(), step)
    assert_close(logits[0], oracle_logits(tiny_llama[1], PROMPT))


def test_chunked_prefill_gives_the_same_logits(
    tiny_worker: Worker, tiny_llama: tuple[Path, Any]
) -> None:
    runner = tiny_worker.runner()
    first = run(runner, step_of(1, [new_request(1, PROMPT, blocks=[7, 3], scheduled=5)]))
    assert first.num_sampled_tokens == [0]
    run(runner, step_of(2, again=cached((1, 5, 1))))
    logits = logits_after(runner, step_of(3, again=cached((1, 6, 7), new_blocks={1: [9, 1]})))
    assert_close(logits[0], oracle_logits(tiny_llama[1], PROMPT))


def test_decode_in_a_mixed_batch_gives_the_same_logits(
    tiny_worker: Worker, tiny_llama: tuple[Path, Any]
) -> None:
    """Decodes of different lengths, a chunk with context, and a fresh prompt in one step."""
    runner, model = tiny_worker.runner(), tiny_llama[1]
    short, long = PROMPT[:3], PROMPT
    new = [
        new_request(1, short, blocks=[1]),
        new_request(2, long, blocks=[2, 3, 4, 5]),
        new_request(3, long, blocks=[10, 11, 12, 13], scheduled=6),
    ]
    tokens = tokens_of(run(runner, step_of(1, new)))
    mixed = step_of(
        2, [new_request(4, long[:7], blocks=[20, 21])], cached((3, 6, 7), (1, 3, 1), (2, 13, 1))
    )
    logits = logits_after(runner, mixed)
    # decodes come first in the batch, then the rest in the order of the message
    expected = [[*short, tokens[1]], [*long, tokens[2]], long[:7], long]
    for row, sequence in zip(logits, expected, strict=True):
        assert_close(row, oracle_logits(model, sequence))


def test_greedy_decode_equals_generate(tiny_worker: Worker, tiny_llama: tuple[Path, Any]) -> None:
    model = tiny_llama[1]
    expected = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    runner = tiny_worker.runner()
    result = run(runner, step_of(1, [new_request(1, PROMPT, blocks=range(1, 10))]))
    output = list(result.sampled_token_ids)
    for i in range(19):
        result = run(runner, step_of(2 + i, again=cached((1, len(PROMPT) + i, 1))))
        output += result.sampled_token_ids
    assert output == expected[0, len(PROMPT) :].tolist()


def test_a_resumed_request_continues_the_same_sample(tiny_worker: Worker) -> None:
    """A8, law 2: preempted after three tokens and recomputed, it draws what it would have drawn."""
    runner = tiny_worker.runner()
    sampling = SamplingParams(temperature=1.5, seed=42)
    result = run(
        runner, step_of(1, [new_request(1, PROMPT, blocks=range(1, 8), sampling=sampling)])
    )
    alone = list(result.sampled_token_ids)
    for i in range(6):
        again = cached((1, len(PROMPT) + i, 1))
        alone += run(runner, step_of(2 + i, again=again)).sampled_token_ids
    resumed = new_request(
        1, PROMPT, blocks=range(20, 28), output=alone[:3], sampling=sampling, scheduled=None
    )
    other = new_request(2, PROMPT[:6], blocks=[40, 41])
    result = run(runner, step_of(9, [resumed, other], preempted_handles=[1]))
    replayed = [tokens_of(result)[1]]
    for i in range(3):
        again = cached((2, 6 + i, 1), (1, len(PROMPT) + 3 + i, 1))
        replayed.append(tokens_of(run(runner, step_of(10 + i, again=again)))[1])
    assert replayed == alone[3:7]


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16, "num_key_value_heads": 6},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["tied", "biases", "head_dim", "rope-linear", "rope-llama3"],
)
def test_variants_of_llama_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model = save_llama(tmp_path / "model", **overrides)
    if overrides.get("attention_bias"):
        _randomise_biases(model, tmp_path / "model")
    runner = loaded_worker(tmp_path / "model", tmp_path / "cache").runner()
    logits = logits_after(runner, step_of(1, [new_request(1, PROMPT, blocks=range(1, 5))]))
    assert_close(logits[0], oracle_logits(model, PROMPT))


def _randomise_biases(model: Any, path: Path) -> None:
    """transformers starts biases at zero, where adding none would pass too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(path)


def test_mistral_without_a_window_equals_transformers(tmp_path: Path) -> None:
    model = save_mistral(tmp_path / "model")
    runner = loaded_worker(tmp_path / "model", tmp_path / "cache").runner()
    logits = logits_after(runner, step_of(1, [new_request(1, PROMPT, blocks=range(1, 5))]))
    assert_close(logits[0], oracle_logits(model, PROMPT))


def test_logprobs_are_of_the_unedited_distribution(
    tiny_worker: Worker, tiny_llama: tuple[Path, Any]
) -> None:
    expected = oracle_logits(tiny_llama[1], PROMPT).log_softmax(-1)
    banned = int(expected.argmax())
    sampling = SamplingParams(temperature=0.0, logit_bias={banned: -100.0}, logprobs=2)
    step = step_of(1, [new_request(1, PROMPT, blocks=range(1, 5), sampling=sampling)])
    result = run(tiny_worker.runner(), step)
    columns, token = result.logprobs, result.sampled_token_ids[0]
    assert token == int(expected.topk(2).indices[1])
    assert columns.handles == [1]
    assert columns.num_candidates == [3]
    assert columns.token_ids == [token, banned, token]
    assert columns.ranks == [2, 1, 2]
    assert columns.logprobs == pytest.approx(expected[columns.token_ids].tolist(), abs=1e-4)


def test_prompt_logprobs_over_chunks(tiny_worker: Worker, tiny_llama: tuple[Path, Any]) -> None:
    runner = tiny_worker.runner()
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    new = new_request(1, PROMPT, blocks=range(1, 5), sampling=sampling, scheduled=5)
    columns = [run(runner, step_of(1, [new])).prompt_logprobs]
    columns.append(run(runner, step_of(2, again=cached((1, 5, 8)))).prompt_logprobs)
    columns.append(run(runner, step_of(3, again=cached((1, 13, 1)))).prompt_logprobs)
    with torch.inference_mode():
        scores = tiny_llama[1](torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = [float(scores[i, token]) for i, token in enumerate(PROMPT[1:])]
    assert [c.token_ids for c in columns] == [PROMPT[1:6], PROMPT[6:], []]
    scored = [value for c in columns for value in c.logprobs]
    assert scored == pytest.approx(expected, abs=1e-4)


def test_a_request_that_does_not_fit_together_fails_alone(tiny_worker: Worker) -> None:
    """C2: bad token ids, missing blocks, an unknown token in a bias."""
    runner = tiny_worker.runner()
    new = [
        new_request(1, [5, VOCAB_SIZE], blocks=[1]),
        new_request(2, PROMPT, blocks=[2]),
        new_request(3, PROMPT[:3], blocks=[3], sampling=SamplingParams(logit_bias={10**6: 1.0})),
        new_request(4, PROMPT[:3], blocks=[4]),
        new_request(5, PROMPT[:3], blocks=[SHAPE.num_blocks]),
    ]
    result = run(runner, step_of(1, new))
    assert result.handles == [1, 2, 3, 4, 5]
    assert result.num_sampled_tokens == [0, 0, 0, 1, 0]
    assert set(result.failed) == {1, 2, 3, 5}
    assert {type(error) for error in result.failed.values()} == {InvalidArgumentError}
    # the schedule may run ahead of the failure; then the enginecore forgets it
    result = run(runner, step_of(2, again=cached((1, 2, 1), (4, 3, 1))))
    assert result.num_sampled_tokens == [0, 1]
    assert set(result.failed) == {1}
    run(runner, step_of(3, again=cached((4, 4, 1)), finished_handles=[1, 2, 3, 5]))


def test_a_poison_request_is_found_by_halving(
    tiny_worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A forward that raises for one of seven requests ends that one only."""
    runner = tiny_worker.runner()
    new = [new_request(i, [50 + i, 7, 8], blocks=[i]) for i in range(1, 8)]
    healthy = tokens_of(run(runner, step_of(1, new)))
    runner.reset()
    real = runner._model

    class Poisoned:
        def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if (token_ids == 53).any():
                raise RuntimeError("device fault")
            return real(token_ids, positions)

        compute_logits = staticmethod(real.compute_logits)

    monkeypatch.setattr(runner, "_model", Poisoned())
    result = run(runner, step_of(1, new))
    assert set(result.failed) == {3}
    assert tokens_of(result) == {h: t for h, t in healthy.items() if h != 3}
    assert "device fault" in caplog.text


def test_scores_that_are_not_finite_fail_their_request_and_leave_no_trace(
    tiny_worker: Worker,
) -> None:
    runner = tiny_worker.runner()
    layer = runner._kv_cache.layers[0]
    layer.value[5].fill_(float("nan"))
    new = [
        new_request(1, PROMPT[:6], blocks=[5, 6], computed=4),
        new_request(2, PROMPT[:6], blocks=[7, 8]),
    ]
    result = run(runner, step_of(1, new))
    assert set(result.failed) == {1}
    assert result.num_sampled_tokens == [0, 1]
    assert bool(layer.value[5].isfinite().all())


def test_unknown_handles_end_the_stream(tiny_worker: Worker) -> None:
    runner = tiny_worker.runner()
    with pytest.raises(FailedPreconditionError, match="handle 9"):
        runner.execute_model(step_of(1, again=cached((9, 3, 1))))
    with pytest.raises(FailedPreconditionError, match="handle 9"):
        runner.execute_model(step_of(1, finished_handles=[9]))


def test_columns_that_do_not_fit_together_end_the_stream(tiny_worker: Worker) -> None:
    columns = cached((1, 3, 1), new_blocks={1: [4]})
    columns.num_new_blocks[0] = 2
    with pytest.raises(InvalidArgumentError, match="columns"):
        tiny_worker.runner().execute_model(step_of(1, again=columns))


def test_more_requests_than_rows_are_refused(tiny_worker: Worker) -> None:
    """A14: the worker never holds more than max_num_seqs requests; leaving comes before joining."""
    runner = tiny_worker.runner()
    new = [new_request(i, [5, 6], blocks=[1 + i]) for i in range(SHAPE.max_num_seqs)]
    run(runner, step_of(1, new))
    swapped = step_of(2, [new_request(0, [5, 6], blocks=[20])], preempted_handles=[0])
    assert run(runner, swapped).num_sampled_tokens == [1]
    with pytest.raises(InvalidArgumentError, match="requests in the batch"):
        runner.execute_model(step_of(3, [new_request(99, [5, 6], blocks=[30])]))


def test_the_inventory_tells_what_is_in_the_cache(tiny_worker: Worker) -> None:
    runner = tiny_worker.runner()
    run(runner, step_of(1, [new_request(1, PROMPT, blocks=[4, 5, 6], scheduled=9)]))
    held = runner.reset()
    assert [(h.request_id, h.num_computed_tokens, h.block_ids) for h in held] == [
        ("request-1", 9, [[4, 5, 6]])
    ]
    assert runner.reset() == []


def test_an_empty_step_is_a_step(tiny_worker: Worker) -> None:
    runner = tiny_worker.runner()
    run(runner, step_of(1, [new_request(1, PROMPT[:3], blocks=[1], sampling=GREEDY)]))
    result = run(runner, step_of(2, finished_handles=[1]))
    assert (result.step, result.handles, result.failed) == (2, [], {})
    assert runner.reset() == []
