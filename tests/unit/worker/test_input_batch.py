"""The persistent batch (D1)."""

import numpy as np
import pytest

from services.errors import FailedPreconditionError, InvalidArgumentError
from tests.unit.worker.tiny_models import (
    EOS_ID,
    GREEDY,
    SHAPE,
    VOCAB_SIZE,
    cached,
    ints,
    new_request,
    step_of,
)
from worker.batch_update import apply_step
from worker.input_batch import InputBatch
from worker.model_inputs import prepare_inputs
from worker.sampling_params import SamplingParams
from worker.step import NewRequest


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(SHAPE, num_groups=1, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))


def row_tokens(batch: InputBatch, handle: int) -> list[int]:
    row = batch.row_of[handle]
    tokens: list[int] = batch.token_ids[row, : batch.num_tokens[row]].tolist()
    return tokens


def test_a_new_request_is_added_whole(batch: InputBatch) -> None:
    apply_step(batch, step_of(1, [new_request(1, [5, 6, 7], blocks=[9], output=[8])]))
    row = batch.row_of[1]
    assert row_tokens(batch, 1) == [5, 6, 7, 8]
    assert batch.num_prompt_tokens[row] == 3
    assert batch.block_tables[0].of(row).tolist() == [9]


def test_an_unscheduled_request_keeps_its_state_and_returns_without_being_resent(
    batch: InputBatch,
) -> None:
    new = [new_request(i, [5, 6, i], blocks=[i]) for i in (1, 2)]
    apply_step(batch, step_of(1, new))
    batch.append_token(batch.row_of[1], 50)
    batch.append_token(batch.row_of[2], 51)
    scheduled = apply_step(batch, step_of(2, again=cached((1, 3, 1))))
    assert scheduled.handles == [1]
    assert row_tokens(batch, 2) == [5, 6, 2, 51]
    scheduled = apply_step(batch, step_of(3, again=cached((2, 3, 1), new_blocks={2: [12]})))
    assert scheduled.rows == [batch.row_of[2]]
    assert batch.block_tables[0].of(batch.row_of[2]).tolist() == [2, 12]


def test_a_finished_request_is_gone_and_its_row_leaks_nothing(batch: InputBatch) -> None:
    """A freed row's next tenant has its own tokens, blocks and masks only."""
    masked = SamplingParams(temperature=0.0, allowed_token_ids=(3,))
    old = new_request(1, list(range(10, 30)), blocks=[1, 2, 3, 4, 5], sampling=masked)
    apply_step(batch, step_of(1, [old]))
    row = batch.row_of[1]
    assert batch.sampling_metadata(ints([row])).edits
    apply_step(batch, step_of(2, [new_request(2, [7, 8], blocks=[6])], finished_handles=[1]))
    assert batch.row_of == {2: row}
    assert row_tokens(batch, 2) == [7, 8]
    assert batch.block_tables[0].of(row).tolist() == [6]
    assert not batch.sampling_metadata(ints([row])).edits


def test_a_resumed_request_replaces_its_blocks(batch: InputBatch) -> None:
    """A8: its handle may be in preempted and in new of one message."""
    apply_step(batch, step_of(1, [new_request(1, [5, 6, 7, 8, 9], blocks=[1, 2])]))
    back = new_request(1, [5, 6, 7, 8, 9], output=[4], blocks=[20, 21])
    apply_step(batch, step_of(2, [back], preempted_handles=[1]))
    assert batch.block_tables[0].of(batch.row_of[1]).tolist() == [20, 21]
    assert row_tokens(batch, 1) == [5, 6, 7, 8, 9, 4]


def test_sampling_metadata_is_rebuilt_only_when_rows_change(batch: InputBatch) -> None:
    new = [new_request(i, [5, 6], blocks=[i, i + 2]) for i in (1, 2)]
    apply_step(batch, step_of(1, new))
    rows = ints([batch.row_of[1], batch.row_of[2]])
    first = batch.sampling_metadata(rows)
    for step in range(2, 5):
        for row in rows.tolist():
            batch.append_token(row, 9)
        apply_step(batch, step_of(step, again=cached((1, step, 1), (2, step, 1))))
        assert batch.sampling_metadata(rows) is first
    assert batch.metadata_builds == 1
    batch.sampling_metadata(rows[:1])
    apply_step(batch, step_of(9, [new_request(3, [5], blocks=[9])], finished_handles=[2]))
    batch.sampling_metadata(ints([batch.row_of[1], batch.row_of[3]]))
    assert batch.metadata_builds == 3


def test_handles_are_joined_once(batch: InputBatch) -> None:
    apply_step(batch, step_of(1, [new_request(1, [5, 6], blocks=[1])]))
    with pytest.raises(FailedPreconditionError, match="already"):
        apply_step(batch, step_of(2, [new_request(1, [5, 6], blocks=[1])]))
    with pytest.raises(InvalidArgumentError, match="twice"):
        apply_step(batch, step_of(2, again=cached((1, 1, 1), (1, 1, 1))))


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (new_request(1, [], blocks=[1], scheduled=1), "empty"),
        (new_request(1, [5] * 65, blocks=range(1, 18)), "longest sequence"),
        (new_request(1, [5, -1], blocks=[1]), "vocabulary"),
        (new_request(1, [5, 6], blocks=[64]), "outside the cache"),
        (new_request(1, [5, 6], blocks=range(1, 20)), "19 blocks"),
        (new_request(1, [5] * 6, blocks=[1]), "no blocks"),
        (new_request(1, [5, 6], blocks=[1], scheduled=3), "do not exist"),
        (new_request(1, [5, 6], blocks=[1], scheduled=0), "do not exist"),
    ],
)
def test_what_is_wrong_with_a_request_fails_it(
    batch: InputBatch, new: NewRequest, text: str
) -> None:
    scheduled = apply_step(batch, step_of(1, [new]))
    assert text in scheduled.failed[1].message
    assert scheduled.rows == []
    assert batch.row_of == {}
    apply_step(batch, step_of(2, finished_handles=[1]))
    assert batch.failed == {}


def test_a_step_may_not_exceed_its_token_budget(batch: InputBatch) -> None:
    new = [new_request(i, [5] * 40, blocks=range(20 * i, 20 * i + 10)) for i in (1, 2)]
    with pytest.raises(InvalidArgumentError, match="tokens in the step"):
        apply_step(batch, step_of(1, new))


def test_inputs_put_decodes_first_and_map_every_token_to_its_slot(batch: InputBatch) -> None:
    new = [
        new_request(1, [10, 11, 12, 13, 14, 15], blocks=[3, 7], computed=3, scheduled=2),
        new_request(2, [20, 21, 22], blocks=[5], computed=2),
    ]
    scheduled = apply_step(batch, step_of(1, new))
    inputs = prepare_inputs(batch, ints(scheduled.rows), ints(scheduled.num_scheduled))
    assert inputs.rows.tolist() == [batch.row_of[2], batch.row_of[1]]
    assert inputs.token_ids.tolist() == [22, 13, 14]
    assert inputs.positions.tolist() == [2, 3, 4]
    assert inputs.attention.query_start_loc.tolist() == [0, 1, 3]
    assert inputs.attention.seq_lens.tolist() == [3, 5]
    assert inputs.attention.slot_mapping.tolist() == [5 * 4 + 2, 3 * 4 + 3, 7 * 4]
    # the first is computed to its end, the second one token short of it
    assert inputs.sampled.tolist() == [0]
    assert inputs.logits_indices.tolist() == [0]


def test_tokens_of_random_traffic_stay_with_their_requests(batch: InputBatch) -> None:
    """Requests come, decode and go at random; the batch equals a plain dictionary of lists."""
    rng = np.random.default_rng(0)
    model: dict[int, list[int]] = {}
    next_handle = 1
    for number in range(300):
        finished = [h for h in model if rng.random() < 0.1]
        for handle in finished:
            del model[handle]
        running = [h for h in model if rng.random() < 0.7 and len(model[h]) < 12]
        rows = cached(*((h, len(model[h]) - 1, 1) for h in running))
        new = []
        while len(model) < SHAPE.max_num_seqs and rng.random() < 0.5:
            prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 9)).tolist()
            blocks = range(3 * (next_handle % 20) + 1, 3 * (next_handle % 20) + 4)
            new.append(new_request(next_handle, prompt, blocks=blocks, sampling=GREEDY))
            model[next_handle] = prompt
            next_handle += 1
        scheduled = apply_step(batch, step_of(number, new, rows, finished_handles=finished))
        assert scheduled.failed == {}
        for row, handle in zip(scheduled.rows, scheduled.handles, strict=True):
            token = int(rng.integers(0, VOCAB_SIZE))
            batch.append_token(row, token)
            model[handle].append(token)
        assert {h: row_tokens(batch, h) for h in batch.row_of} == model
