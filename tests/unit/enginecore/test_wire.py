import pytest

from enginecore import wire
from enginecore.scheduler_output import Logprobs
from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.worker.v1 import worker_pb2
from services.errors import InvalidArgumentError
from tests.unit.enginecore.builders import make_request, make_scheduler, run_step


def test_scheduler_output_becomes_packed_columns() -> None:
    scheduler = make_scheduler(num_blocks=100)
    params = sampling_pb2.SamplingParams(seed=3, temperature=0.5)
    scheduler.add_requests(
        [make_request(i, 16, sampling_params=params, traceparent=f"tp{i}") for i in (1, 2)]
    )
    first, _ = run_step(scheduler)
    message = wire.scheduler_output_to_proto(first, 77)
    assert (message.epoch, message.step) == (77, 1)
    new = message.scheduler_output.scheduled_new_reqs[0]
    assert (new.handle, new.request_id, new.resumed) == (1, "request-1", False)
    assert list(new.prompt_token_ids) == [1] * 16
    assert [list(ids.ids) for ids in new.block_ids] == [[1]]
    assert new.sampling_params == params
    assert new.traceparent == "tp1"
    scheduler.abort(2)
    message = wire.scheduler_output_to_proto(scheduler.schedule(), 77)
    cached = message.scheduler_output.scheduled_cached_reqs
    assert list(cached.handles) == [1]
    assert list(cached.num_computed_tokens) == [16]
    assert list(cached.num_scheduled_tokens) == [1]
    assert list(cached.num_new_blocks) == [1]
    assert len(cached.new_block_ids) == 1
    assert list(message.scheduler_output.finished_handles) == [2]


def test_decode_step_of_256_requests_is_under_two_kilobytes() -> None:
    scheduler = make_scheduler(num_blocks=1000, max_num_seqs=256)
    params = sampling_pb2.SamplingParams(seed=3)
    scheduler.add_requests([make_request(i, 3, sampling_params=params) for i in range(1, 257)])
    run_step(scheduler)
    size = wire.scheduler_output_to_proto(scheduler.schedule(), 1 << 60).ByteSize()
    assert 256 < size < 2048


def test_result_is_split_by_request() -> None:
    message = worker_pb2.ModelRunnerOutput(
        step=4,
        handles=[5, 6],
        num_sampled_tokens=[2, 1],
        sampled_token_ids=[10, 11, 12],
        logprobs=output_pb2.Logprobs(
            num_candidates=[1, 2, 1],
            token_ids=[10, 11, 20, 12],
            logprobs=[-1, -2, -3, -4],
            ranks=[1, 1, 2, 1],
        ),
        logprobs_handles=[5, 5, 6],
    )
    output = wire.model_runner_output_from_proto(message)
    assert output.sampled_token_ids == [10, 11, 12]
    assert output.logprobs[5] == Logprobs([1, 2], [10, 11, 20], [-1, -2, -3], [1, 1, 2])
    assert output.logprobs[6] == Logprobs([1], [12], [-4], [1])
    assert output.logprobs[5].positions(1, 2) == Logprobs([2], [11, 20], [-2, -3], [1, 2])


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.ModelRunnerOutput(handles=[1]),
        worker_pb2.ModelRunnerOutput(handles=[1], num_sampled_tokens=[1]),
        worker_pb2.ModelRunnerOutput(logprobs_handles=[1]),
        worker_pb2.ModelRunnerOutput(prompt_logprobs_handles=[1]),
    ],
)
def test_columns_that_do_not_fit_are_refused(message: worker_pb2.ModelRunnerOutput) -> None:
    with pytest.raises(InvalidArgumentError):
        wire.model_runner_output_from_proto(message)
