"""A step while the scheduler puts it together."""

from enginecore.request import Request
from enginecore.scheduler_output import CachedRequestData, NewRequestData


class StepPlan:
    """Spends one step's token budget, and can take back what it gave.

    Args:
        step: the step's number.
        budget: tokens that the step may compute.
        num_groups: KV cache groups, each with its own new blocks per request.
    """

    __slots__ = ("_num_groups", "budget", "cached", "new", "no_blocks", "preempted", "step")

    def __init__(self, step: int, budget: int, num_groups: int) -> None:
        self.step = step
        self.budget = budget
        self.cached = CachedRequestData()
        self.new: list[NewRequestData] = []
        self.preempted: list[int] = []
        self.no_blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self._num_groups = num_groups

    def add_cached(self, request: Request, num_new: int, new_blocks: list[list[int]]) -> None:
        """Gives a request of the batch its next `num_new` tokens and the blocks they need."""
        columns = self.cached
        columns.handles.append(request.handle)
        columns.num_computed_tokens.append(request.num_computed_tokens)
        columns.num_scheduled_tokens.append(num_new)
        for block_ids in new_blocks:
            columns.num_new_blocks.append(len(block_ids))
            columns.new_block_ids += block_ids
        self._advance(request, num_new)

    def add_new(
        self, request: Request, num_new: int, block_ids: list[list[int]], resumed: bool
    ) -> None:
        """Lets a request join the batch and gives it its next `num_new` tokens."""
        self.new.append(
            NewRequestData(
                request.handle,
                request.request_id,
                request.prompt_token_ids,
                # A copy: the list grows when a result arrives, perhaps before this is written.
                list(request.output_token_ids),
                request.sampling_params,
                block_ids,
                request.num_computed_tokens,
                num_new,
                resumed,
                request.traceparent,
            )
        )
        self._advance(request, num_new)

    def preempt(self, request: Request) -> None:
        """Takes a request of the batch out of the step."""
        self.preempted.append(request.handle)
        columns = self.cached
        if request.handle not in columns.handles:
            return
        row = columns.handles.index(request.handle)
        counts = columns.num_new_blocks
        first, last = row * self._num_groups, (row + 1) * self._num_groups
        first_block = sum(counts[:first])
        del columns.new_block_ids[first_block : first_block + sum(counts[first:last])]
        del counts[first:last]
        del columns.handles[row]
        self.budget += columns.num_scheduled_tokens.pop(row)
        request.num_computed_tokens = columns.num_computed_tokens.pop(row)

    def _advance(self, request: Request, num_new: int) -> None:
        request.num_computed_tokens += num_new
        request.last_progress_step = self.step
        self.budget -= num_new
