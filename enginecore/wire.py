"""worker.v1 ↔ the scheduler's dataclasses."""

from enginecore.kv_cache_config import KVCacheGroupSpec, ModelFacts
from enginecore.scheduler_output import (
    Logprobs,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    StepTimings,
)
from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.worker.v1 import worker_pb2
from services import request_errors
from services.errors import InvalidArgumentError


def scheduler_output_to_proto(output: SchedulerOutput, epoch: int) -> worker_pb2.ExecuteRequest:
    """The message of one step."""
    cached = output.scheduled_cached_reqs
    return worker_pb2.ExecuteRequest(
        epoch=epoch,
        step=output.step,
        scheduler_output=worker_pb2.SchedulerOutput(
            scheduled_new_reqs=[_new_request_to_proto(new) for new in output.scheduled_new_reqs],
            scheduled_cached_reqs=worker_pb2.CachedRequestData(
                handles=cached.handles,
                num_computed_tokens=cached.num_computed_tokens,
                num_scheduled_tokens=cached.num_scheduled_tokens,
                num_new_blocks=cached.num_new_blocks,
                new_block_ids=cached.new_block_ids,
            ),
            finished_handles=output.finished_handles,
            preempted_handles=output.preempted_handles,
        ),
    )


def _new_request_to_proto(new: NewRequestData) -> worker_pb2.NewRequestData:
    assert isinstance(new.sampling_params, sampling_pb2.SamplingParams)
    return worker_pb2.NewRequestData(
        handle=new.handle,
        request_id=new.request_id,
        prompt_token_ids=new.prompt_token_ids,
        output_token_ids=new.output_token_ids,
        sampling_params=new.sampling_params,
        block_ids=[worker_pb2.BlockIds(ids=ids) for ids in new.block_ids],
        num_computed_tokens=new.num_computed_tokens,
        num_scheduled_tokens=new.num_scheduled_tokens,
        resumed=new.resumed,
        traceparent=new.traceparent,
    )


def model_runner_output_from_proto(message: worker_pb2.ModelRunnerOutput) -> ModelRunnerOutput:
    """The result of one step. Errors: InvalidArgumentError when its columns do not fit together."""
    _check_columns(message)
    output = ModelRunnerOutput(
        message.step,
        list(message.handles),
        list(message.num_sampled_tokens),
        list(message.sampled_token_ids),
        failed={
            failure.handle: request_errors.from_proto(failure.error)
            for failure in message.failed_requests
        },
    )
    if message.logprobs_handles:
        logprobs = logprobs_from_proto(message.logprobs)
        output.logprobs = logprobs.split(list(message.logprobs_handles))
    if message.prompt_logprobs_handles:
        logprobs = logprobs_from_proto(message.prompt_logprobs)
        output.prompt_logprobs = logprobs.split(list(message.prompt_logprobs_handles))
    timings = message.timings
    output.timings = StepTimings(
        timings.started_unix_ns,
        timings.queue_ns,
        timings.prepare_ns,
        timings.forward_ns,
        timings.sample_ns,
    )
    return output


def _check_columns(message: worker_pb2.ModelRunnerOutput) -> None:
    fits = (
        len(message.handles) == len(message.num_sampled_tokens)
        and sum(message.num_sampled_tokens) == len(message.sampled_token_ids)
        and len(message.logprobs.num_candidates) == len(message.logprobs_handles)
        and len(message.prompt_logprobs.num_candidates) == len(message.prompt_logprobs_handles)
    )
    if not fits:
        raise InvalidArgumentError("the columns of the worker's result do not fit together")


def logprobs_from_proto(message: output_pb2.Logprobs) -> Logprobs:
    """Copies the columns."""
    return Logprobs(
        list(message.num_candidates),
        list(message.token_ids),
        list(message.logprobs),
        list(message.ranks),
    )


def logprobs_to_proto(logprobs: Logprobs) -> output_pb2.Logprobs:
    """Copies the columns."""
    return output_pb2.Logprobs(
        num_candidates=logprobs.num_candidates,
        token_ids=logprobs.token_ids,
        logprobs=logprobs.logprobs,
        ranks=logprobs.ranks,
    )


def model_facts_from_proto(model: worker_pb2.ModelInfo) -> ModelFacts:
    """What a worker says of its model."""
    groups = tuple(
        KVCacheGroupSpec(
            group.num_layers,
            group.bytes_per_token,
            group.sliding_window if group.HasField("sliding_window") else None,
        )
        for group in model.kv_cache_groups
    )
    return ModelFacts(
        model.model,
        model.architecture,
        model.dtype,
        model.vocab_size,
        model.max_position_embeddings,
        frozenset(model.eos_token_ids),
        model.weight_bytes,
        groups,
    )
