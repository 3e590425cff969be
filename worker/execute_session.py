"""One Execute stream: from its messages to the compute thread and back.

The event loop checks and queues each step at once; the compute thread runs them in order, waiting
within a step for its grammar masks if it announced them. Results and the error that ends the stream
come back through one outbox.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future

from services.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
)
from worker.compute_thread import ComputeThread
from worker.step import GrammarMask, StepInput, StepResult
from worker.tracing import StepTracer
from worker.worker import Worker

log = logging.getLogger(__name__)

MAX_STEPS_UNDER_WAY = 8
"""More than any schedule-ahead depth; beyond it the peer is not waiting for results at all."""

_Outcome = StepResult | ServiceError | None


class ExecuteSession:
    """The state of one stream. Belongs to the event loop but for `_run`."""

    def __init__(self, epoch: int, worker: Worker, compute: ComputeThread) -> None:
        self.epoch = epoch
        self._worker = worker
        self._compute = compute
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[_Outcome] = asyncio.Queue()
        self._next_step: int | None = None
        self._under_way: dict[int, StepInput] = {}
        self._masks: dict[int, Future[GrammarMask]] = {}
        self._closed = False
        self._tracer = StepTracer()
        compute.post(worker.begin_stream)

    def submit_step(self, step: StepInput) -> None:
        """Queues a step.

        Errors: FailedPreconditionError for a gap in steps, ResourceExhaustedError when too many are
        under way.
        """
        if self._next_step is not None and step.step != self._next_step:
            raise FailedPreconditionError(f"expected step {self._next_step}, got {step.step}")
        if len(self._under_way) >= MAX_STEPS_UNDER_WAY:
            raise ResourceExhaustedError(f"more than {MAX_STEPS_UNDER_WAY} steps are under way")
        self._next_step = step.step + 1
        self._under_way[step.step] = step
        mask: Future[GrammarMask] | None = None
        if step.has_grammar:
            mask = self._masks[step.step] = Future()
        self._compute.post(lambda: self._run(step, mask))

    def submit_grammar(self, step: int, masks: GrammarMask) -> None:
        """Hands over the masks that a step waits for.

        Errors: InvalidArgumentError when the step announced none or has them already.
        """
        mask = self._masks.pop(step, None)
        if mask is None:
            raise InvalidArgumentError(f"step {step} is not waiting for a grammar_output")
        mask.set_result(masks)

    def finish(self) -> None:
        """No more messages come: the stream ends after the steps under way."""
        for mask in self._masks.values():
            mask.cancel()
        self._compute.post(lambda: self._post(None))

    def fail(self, error: ServiceError) -> None:
        """Ends the stream with an error, now."""
        self._outbox.put_nowait(error)
        self.close()

    def close(self) -> None:
        """Drops the batch and whatever was queued; may be called again."""
        if self._closed:
            return
        self._closed = True
        for mask in self._masks.values():
            mask.cancel()
        self._compute.post(self._worker.end_stream)
        self._tracer.close()

    async def results(self) -> AsyncIterator[StepResult]:
        """Yields results in order. Errors: the one that ended the stream."""
        while (outcome := await self._outbox.get()) is not None:
            if isinstance(outcome, ServiceError):
                raise outcome
            yield outcome

    def _run(self, step: StepInput, mask: Future[GrammarMask] | None) -> None:
        """Runs one step, on the compute thread."""
        if self._closed:
            return
        try:
            runner = self._worker.runner()
            runner.execute_model(step)
            self._post(runner.sample_tokens(None if mask is None else mask.result()))
        except CancelledError:
            return
        except ServiceError as error:
            self._post(error)
        except Exception:
            log.exception("step %d failed", step.step)
            self._post(InternalError("the step failed"))

    def _post(self, outcome: _Outcome) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outcome)

    def _deliver(self, outcome: _Outcome) -> None:
        if self._closed:
            return
        if isinstance(outcome, ServiceError):
            self.fail(outcome)
            return
        self._outbox.put_nowait(outcome)
        if outcome is not None:
            self._masks.pop(outcome.step, None)
            self._tracer.observe(self._under_way.pop(outcome.step), outcome)
