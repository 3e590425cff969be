"""Runs steps of the batch: update states, prepare the inputs, forward, sample.

`execute_model` and `sample_tokens` alternate. Between them the grammar's masks may arrive. A
request whose last known token was computed is sampled; the token joins the batch here, and is not
sent back.

A fault while one request is prepared or sampled ends that request. A fault in a forward of many
cannot be attributed: the forward is run again on each half of them until the culprit is alone.
Running again is harmless, for keys and values are written where they were before.
"""

import logging
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.errors import InternalError, InvalidArgumentError, ServiceError
from worker.attention.backend import AttentionBackend
from worker.batch_update import ScheduledRows, apply_step
from worker.forward_context import ForwardContext, forward_context
from worker.input_batch import InputBatch
from worker.kv_cache import KvCache
from worker.logprobs import append_logprobs
from worker.model_config import ModelConfig
from worker.model_inputs import ModelInputs, prepare_inputs
from worker.models.registry import CausalLM
from worker.sampler import SamplerInput, sample
from worker.step import (
    GrammarMask,
    HeldRequest,
    IntArray,
    LogprobColumns,
    StepInput,
    StepResult,
    StepTimings,
)

log = logging.getLogger(__name__)

_NUM_GROUPS = 1
# rows of logits that are in memory at once for prompt log-probabilities
_PROMPT_LOGPROBS_ROWS = 64


@dataclass(slots=True)
class _PendingStep:
    """A step between its forward and its sampling."""

    step: int
    scheduled: ScheduledRows
    rows: IntArray
    """Rows to sample."""
    logits: Tensor
    """`[len(rows), vocab]`."""
    timings: StepTimings
    computed_at_ns: int = 0
    """Monotonic clock when the logits were there."""
    prompt_logprobs: LogprobColumns = field(default_factory=LogprobColumns)


class ModelRunner:
    """The batch and the model that computes it. Used by the compute thread only."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        kv_cache: KvCache,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._config = config
        self._kv_cache = kv_cache
        self._backend = backend
        self._dtype = dtype
        self._pending: _PendingStep | None = None
        self.batch = self._empty_batch()

    def reset(self) -> list[HeldRequest]:
        """Drops the batch; returns what its requests hold in the KV cache."""
        held = self.batch.held()
        self._pending = None
        self.batch = self._empty_batch()
        return held

    @torch.inference_mode()
    def execute_model(self, step: StepInput) -> None:
        """Runs a step up to its logits.

        Errors: FailedPreconditionError, InvalidArgumentError: the message does not fit the batch.
        """
        timings = StepTimings(started_unix_ns=time.time_ns())
        started = time.perf_counter_ns()
        timings.queue_ns = started - step.received_ns if step.received_ns else 0
        scheduled = apply_step(self.batch, step)
        pending = _PendingStep(
            step.step, scheduled, np.empty(0, np.int64), self._no_logits(), timings
        )
        timings.prepare_ns = time.perf_counter_ns() - started
        if scheduled.rows:
            rows = np.array(scheduled.rows, dtype=np.int64)
            self._forward(rows, np.array(scheduled.num_scheduled, dtype=np.int64), pending)
        pending.computed_at_ns = time.perf_counter_ns()
        timings.forward_ns = pending.computed_at_ns - started - timings.prepare_ns
        self._pending = pending

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarMask | None = None) -> StepResult:
        """Ends the step: samples, and appends the tokens to the batch.

        Errors: InvalidArgumentError when the masks do not fit the step.
        """
        pending = self._pending
        if pending is None:
            raise RuntimeError("no step is waiting to be sampled")
        self._pending = None
        tokens: dict[int, int] = {}
        logprobs = LogprobColumns()
        if len(pending.rows):
            tokens = self._sample(pending, grammar, logprobs)
        pending.timings.sample_ns = time.perf_counter_ns() - pending.computed_at_ns
        handles = pending.scheduled.handles
        return StepResult(
            step=pending.step,
            handles=handles,
            num_sampled_tokens=[int(handle in tokens) for handle in handles],
            sampled_token_ids=[tokens[handle] for handle in handles if handle in tokens],
            failed=pending.scheduled.failed,
            logprobs=logprobs,
            prompt_logprobs=pending.prompt_logprobs,
            timings=pending.timings,
        )

    def _forward(self, rows: IntArray, num_scheduled: IntArray, pending: _PendingStep) -> None:
        """Computes some rows, or halves them until the one that cannot be computed is alone."""
        try:
            inputs, hidden = self._run_model(rows, num_scheduled)
            logits = self._model.compute_logits(hidden.index_select(0, inputs.logits_indices))
            self._prompt_logprobs(inputs, hidden, pending.prompt_logprobs)
        except Exception:
            log.exception("a forward of %d requests failed", len(rows))
            if len(rows) == 1:
                self._fail_row(int(rows[0]), InternalError("the forward pass failed"), pending)
                return
            half = len(rows) // 2
            self._forward(rows[:half], num_scheduled[:half], pending)
            self._forward(rows[half:], num_scheduled[half:], pending)
            return
        self.batch.num_computed_tokens[inputs.rows] = inputs.attention.seq_lens
        pending.rows = np.concatenate((pending.rows, inputs.rows[inputs.sampled]))
        pending.logits = torch.cat((pending.logits, logits)) if len(pending.logits) else logits

    def _run_model(self, rows: IntArray, num_scheduled: IntArray) -> tuple[ModelInputs, Tensor]:
        inputs = prepare_inputs(self.batch, rows, num_scheduled)
        self._backend.begin_step(inputs.attention, self.batch.shape.block_size, self._dtype)
        with forward_context(ForwardContext(self._backend, self._kv_cache.layers)):
            return inputs, self._model(inputs.token_ids, inputs.positions)

    def _sample(
        self, pending: _PendingStep, grammar: GrammarMask | None, logprobs: LogprobColumns
    ) -> dict[int, int]:
        batch, rows = self.batch, pending.rows
        raw = self._raw_logits(pending)
        grammar_rows, bits = self._grammar_rows(rows, grammar)
        metadata = batch.sampling_metadata(rows)
        chosen = sample(
            pending.logits,
            SamplerInput(
                metadata=metadata,
                positions=batch.num_tokens[rows] - batch.num_prompt_tokens[rows],
                histories={i: batch.history(int(rows[i])) for i in metadata.edits},
                grammar_rows=grammar_rows,
                grammar_bits=bits,
            ),
        )
        tokens: dict[int, int] = {}
        for i, row in enumerate(rows.tolist()):
            if i in chosen.failed:
                self._fail_row(row, chosen.failed[i], pending)
                continue
            state, token = batch.state(row), int(chosen.token_ids[i])
            if i in raw:
                wanted = state.sampling.logprobs or 0
                append_logprobs(logprobs, state.handle, raw[i], torch.tensor([token]), wanted)
            batch.append_token(row, token)
            tokens[state.handle] = token
        return tokens

    def _raw_logits(self, pending: _PendingStep) -> dict[int, Tensor]:
        """Copies, made before any edit, of the logits whose log-probabilities are wanted."""
        return {
            i: pending.logits[i : i + 1].clone()
            for i, row in enumerate(pending.rows.tolist())
            if self.batch.state(row).sampling.logprobs is not None
        }

    def _grammar_rows(
        self, rows: IntArray, grammar: GrammarMask | None
    ) -> tuple[list[int], np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None]:
        """Which sampled rows have a mask; masks of requests that failed meanwhile are dropped."""
        if grammar is None or not grammar.handles:
            return [], None
        if grammar.bits.shape[1] * 8 < self._config.vocab_size:
            raise InvalidArgumentError("the bitmask's rows are shorter than the vocabulary")
        place = {self.batch.state(row).handle: i for i, row in enumerate(rows.tolist())}
        kept = [i for i, handle in enumerate(grammar.handles) if handle in place]
        return [place[grammar.handles[i]] for i in kept], grammar.bits[kept]

    def _prompt_logprobs(
        self, inputs: ModelInputs, hidden: Tensor, columns: LogprobColumns
    ) -> None:
        """Scores the prompt tokens that follow the tokens computed here, where asked."""
        starts = inputs.attention.query_start_loc
        for i, row in enumerate(inputs.rows.tolist()):
            state = self.batch.state(row)
            if state.sampling.prompt_logprobs is None:
                continue
            first = int(inputs.positions[starts[i]]) + 1
            end = min(int(inputs.attention.seq_lens[i]) + 1, int(self.batch.num_prompt_tokens[row]))
            for low in range(first, end, _PROMPT_LOGPROBS_ROWS):
                high = min(end, low + _PROMPT_LOGPROBS_ROWS)
                place = int(starts[i]) + low - first
                logits = self._model.compute_logits(hidden[place : place + high - low])
                given = torch.from_numpy(self.batch.token_ids[row, low:high].astype(np.int64))
                wanted = state.sampling.prompt_logprobs
                append_logprobs(columns, state.handle, logits, given, wanted)

    def _fail_row(self, row: int, error: ServiceError, pending: _PendingStep) -> None:
        """Ends one request; what it may have left in its blocks cannot harm the next tenant."""
        handle = self.batch.state(row).handle
        for table in self.batch.block_tables:
            self._kv_cache.scrub(table.of(row))
        self.batch.fail(handle, error)
        pending.scheduled.failed[handle] = error

    def _empty_batch(self) -> InputBatch:
        return InputBatch(
            self._kv_cache.shape,
            num_groups=_NUM_GROUPS,
            vocab_size=self._config.vocab_size,
            eos_token_ids=self._config.eos_token_ids,
        )

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self._config.vocab_size), dtype=torch.float32)
