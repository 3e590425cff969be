"""Applies one step's deltas to the persistent batch.

Order: finished and preempted requests leave, new ones join, cached ones are updated. What is wrong
with one request ends that request; what is wrong with the message ends the stream, for then the two
sides no longer hold the same batch.
"""

from dataclasses import dataclass, field

import numpy as np

from services.errors import FailedPreconditionError, InvalidArgumentError, ServiceError
from worker.input_batch import InputBatch
from worker.step import CachedRequests, IntArray, NewRequest, StepInput


@dataclass(slots=True)
class ScheduledRows:
    """The step's requests."""

    handles: list[int] = field(default_factory=list)
    """All of them, failed ones included."""
    rows: list[int] = field(default_factory=list)
    """Rows to compute."""
    num_scheduled: list[int] = field(default_factory=list)
    """Tokens to compute, per row."""
    failed: dict[int, ServiceError] = field(default_factory=dict)


def apply_step(batch: InputBatch, step: StepInput) -> ScheduledRows:
    """Brings the batch up to date.

    Errors: FailedPreconditionError for an unknown handle, InvalidArgumentError for columns that do
    not fit together or more requests than the batch takes.
    """
    _check_columns(step.cached, len(batch.block_tables))
    for handle in (*step.finished_handles, *step.preempted_handles):
        if not batch.remove(handle):
            raise FailedPreconditionError(f"handle {handle} is not in the batch")
    if len(batch.row_of) + len(step.new_requests) > batch.shape.max_num_seqs:
        raise InvalidArgumentError(f"more than {batch.shape.max_num_seqs} requests in the batch")
    scheduled = ScheduledRows()
    for new in step.new_requests:
        _join(batch, new, scheduled)
    _update_cached(batch, step.cached, scheduled)
    if sum(scheduled.num_scheduled) > batch.shape.max_num_batched_tokens:
        raise InvalidArgumentError(
            f"more than {batch.shape.max_num_batched_tokens} tokens in the step"
        )
    return scheduled


def _check_columns(cached: CachedRequests, num_groups: int) -> None:
    count = len(cached.handles)
    fits = (
        len(cached.num_computed_tokens) == count
        and len(cached.num_scheduled_tokens) == count
        and len(cached.num_new_blocks) == count * num_groups
        and cached.num_new_blocks.sum() == len(cached.new_block_ids)
    )
    if not fits:
        raise InvalidArgumentError("the columns of scheduled_cached_reqs do not fit together")


def _join(batch: InputBatch, new: NewRequest, scheduled: ScheduledRows) -> None:
    scheduled.handles.append(new.handle)
    if new.handle in batch.row_of:
        raise FailedPreconditionError(f"handle {new.handle} is in the batch already")
    try:
        batch.add(new)
        row = batch.row_of[new.handle]
        batch.check_schedule(row, new.num_scheduled_tokens)
    except ServiceError as error:
        batch.fail(new.handle, error)
        scheduled.failed[new.handle] = error
        return
    scheduled.rows.append(row)
    scheduled.num_scheduled.append(new.num_scheduled_tokens)


def _update_cached(batch: InputBatch, cached: CachedRequests, scheduled: ScheduledRows) -> None:
    handles = cached.handles.tolist()
    rows = [batch.row_of.get(handle) for handle in handles]
    for handle, row in zip(handles, rows, strict=True):
        if row is None and handle not in batch.failed:
            raise FailedPreconditionError(f"handle {handle} is not in the batch")
    if len(set(handles) | set(scheduled.handles)) != len(handles) + len(scheduled.handles):
        raise InvalidArgumentError("a request is scheduled twice in one step")
    scheduled.handles += handles
    ends = np.cumsum(cached.num_new_blocks)
    for i, (handle, row) in enumerate(zip(handles, rows, strict=True)):
        if row is None:
            scheduled.failed[handle] = batch.failed[handle]
            continue
        try:
            _update_row(batch, row, cached, i, ends)
        except ServiceError as error:
            batch.fail(handle, error)
            scheduled.failed[handle] = error
            continue
        scheduled.rows.append(row)
        scheduled.num_scheduled.append(int(cached.num_scheduled_tokens[i]))


def _update_row(
    batch: InputBatch, row: int, cached: CachedRequests, i: int, ends: IntArray
) -> None:
    num_groups = len(batch.block_tables)
    for group in range(num_groups):
        column = i * num_groups + group
        count = int(cached.num_new_blocks[column])
        if count:
            end = int(ends[column])
            batch.append_blocks(row, group, cached.new_block_ids[end - count : end])
    batch.num_computed_tokens[row] = cached.num_computed_tokens[i]
    batch.check_schedule(row, int(cached.num_scheduled_tokens[i]))
