"""The persistent batch: the state of every request between its NewRequestData and its end.

A request keeps one row for as long as it is here, whether a step schedules it or not, so steps
carry only what changed and rows never move: there is nothing to swap or condense, and a freed row
is wholly rewritten by its next tenant. Used by the compute thread only.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.errors import InvalidArgumentError, ServiceError
from worker.kv_cache import KvCacheShape
from worker.logits_edits import TokenHistory
from worker.sampler import SamplingMetadata
from worker.sampling_params import SamplingParams
from worker.step import HeldRequest, IntArray, NewRequest


@dataclass(frozen=True, slots=True)
class RequestState:
    """What of a request is not a column."""

    handle: int
    request_id: str
    sampling: SamplingParams


class BlockTable:
    """The blocks of each row, for one KV cache group."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.ids: npt.NDArray[np.int32] = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.counts: IntArray = np.zeros(num_rows, dtype=np.int64)

    def replace(self, row: int, block_ids: IntArray) -> None:
        """Gives a row its blocks anew."""
        self.counts[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: IntArray) -> None:
        """Adds blocks. Errors: InvalidArgumentError beyond the longest sequence's."""
        start = int(self.counts[row])
        end = start + len(block_ids)
        if end > self.ids.shape[1]:
            raise InvalidArgumentError(f"{end} blocks are more than the longest sequence takes")
        self.ids[row, start:end] = block_ids
        self.counts[row] = end

    def of(self, row: int) -> IntArray:
        """A row's blocks, in the order of the tokens they hold."""
        return self.ids[row, : self.counts[row]].astype(np.int64)


class InputBatch:
    """Rows of requests.

    Args:
        shape: how many rows, of how many tokens.
        num_groups: KV cache groups.
        vocab_size: token ids are below it.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self,
        shape: KvCacheShape,
        *,
        num_groups: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        rows = shape.max_num_seqs
        self.shape = shape
        # one place more than a sequence may have: the last sampled token is never computed
        self.token_ids: npt.NDArray[np.int32] = np.zeros((rows, shape.max_model_len + 1), np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(rows, dtype=np.int64)
        self.num_tokens: IntArray = np.zeros(rows, dtype=np.int64)
        self.num_computed_tokens: IntArray = np.zeros(rows, dtype=np.int64)
        max_blocks = -(-shape.max_model_len // shape.block_size)
        self.block_tables = [BlockTable(rows, max_blocks) for _ in range(num_groups)]
        self.states: list[RequestState | None] = [None] * rows
        self.row_of: dict[int, int] = {}
        self.failed: dict[int, ServiceError] = {}
        """Requests that failed, until the enginecore says that they ended."""
        self.metadata_builds = 0
        self._free_rows = list(range(rows - 1, -1, -1))
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._metadata: SamplingMetadata | None = None
        self._metadata_rows: list[int] = []

    def add(self, new: NewRequest) -> None:
        """Takes a request in.

        Errors: InvalidArgumentError when its data does not fit together, or there is no free row.
        """
        self._check_new(new)
        if not self._free_rows:
            raise InvalidArgumentError(
                f"the batch holds {self.shape.max_num_seqs} requests already"
            )
        row = self._free_rows[-1]
        for table, block_ids in zip(self.block_tables, new.block_ids, strict=True):
            self._check_block_ids(block_ids)
            table.replace(row, block_ids)
        self._free_rows.pop()
        prompt, output = new.prompt_token_ids, new.output_token_ids
        total = len(prompt) + len(output)
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : total] = output
        self.num_prompt_tokens[row] = len(prompt)
        self.num_tokens[row] = total
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.states[row] = RequestState(new.handle, new.request_id, new.sampling)
        self.row_of[new.handle] = row
        self._metadata = None

    def remove(self, handle: int) -> bool:
        """Forgets a request, a failed one too. Returns whether it was known."""
        if self.failed.pop(handle, None) is not None:
            return True
        row = self.row_of.pop(handle, None)
        if row is None:
            return False
        self.states[row] = None
        self._free_rows.append(row)
        self._metadata = None
        return True

    def fail(self, handle: int, error: ServiceError) -> None:
        """Frees a request's row and keeps its error, should it be scheduled again."""
        self.remove(handle)
        self.failed[handle] = error

    def append_blocks(self, row: int, group: int, block_ids: IntArray) -> None:
        """Adds blocks. Errors: InvalidArgumentError for a block that does not exist."""
        self._check_block_ids(block_ids)
        self.block_tables[group].append(row, block_ids)

    def check_schedule(self, row: int, num_scheduled: int) -> None:
        """Errors: InvalidArgumentError when the step's tokens are not there to compute."""
        end = int(self.num_computed_tokens[row]) + num_scheduled
        if num_scheduled < 1 or end > self.num_tokens[row]:
            raise InvalidArgumentError("the scheduled tokens do not exist")
        capacity = min(int(table.counts[row]) for table in self.block_tables)
        if end > capacity * self.shape.block_size:
            raise InvalidArgumentError("the scheduled tokens have no blocks")

    def append_token(self, row: int, token_id: int) -> None:
        """Adds a sampled token to the end of a request."""
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def state(self, row: int) -> RequestState:
        """The tenant of a row. Errors: KeyError when it is free."""
        state = self.states[row]
        if state is None:
            raise KeyError(row)
        return state

    def history(self, row: int) -> TokenHistory:
        """The tokens of a row, as views."""
        prompt, total = self.num_prompt_tokens[row], self.num_tokens[row]
        return TokenHistory(self.token_ids[row, :prompt], self.token_ids[row, prompt:total])

    def sampling_metadata(self, rows: IntArray) -> SamplingMetadata:
        """The sampling columns of some rows; rebuilt only when they or the batch changed."""
        wanted = rows.tolist()
        if self._metadata is None or self._metadata_rows != wanted:
            params = [self.state(row).sampling for row in wanted]
            self._metadata = SamplingMetadata.of(params, self._eos_token_ids, self._vocab_size)
            self._metadata_rows = wanted
            self.metadata_builds += 1
        return self._metadata

    def held(self) -> list[HeldRequest]:
        """The requests whose keys and values are in the cache."""
        return [
            HeldRequest(
                self.state(row).request_id,
                int(self.num_computed_tokens[row]),
                [table.of(row).tolist() for table in self.block_tables],
            )
            for row in self.row_of.values()
        ]

    def _check_new(self, new: NewRequest) -> None:
        if new.handle in self.row_of:
            raise InvalidArgumentError("the request is in the batch already")
        total = len(new.prompt_token_ids) + len(new.output_token_ids)
        if len(new.prompt_token_ids) == 0:
            raise InvalidArgumentError("the prompt is empty", param="prompt_token_ids")
        if total > self.shape.max_model_len:
            raise InvalidArgumentError(
                f"{total} tokens are more than the longest sequence of {self.shape.max_model_len}"
            )
        for tokens in (new.prompt_token_ids, new.output_token_ids):
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
                raise InvalidArgumentError(
                    f"a token is outside the vocabulary of {self._vocab_size}",
                    param="prompt_token_ids",
                )
        if len(new.block_ids) != len(self.block_tables):
            raise InvalidArgumentError(f"expected blocks for {len(self.block_tables)} groups")
        new.sampling.check_token_ids(self._vocab_size)

    def _check_block_ids(self, block_ids: IntArray) -> None:
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self.shape.num_blocks:
            raise InvalidArgumentError(f"a block is outside the cache of {self.shape.num_blocks}")
