"""Spans of what the device did, drawn from the timings of finished steps.

`worker.prefill` and `worker.decode` are children of the context that a request brought; each is
made when it ends, with explicit times, so that a step costs no span per request. `worker.step` is a
trace of its own, made when the enginecore samples the step, linked to every traced request in it
and from each of their spans.
"""

from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, get_current_span
from opentelemetry.util.types import AttributeValue

from services.errors import ServiceError
from services.telemetry import context_from_headers, tracer
from worker.step import NewRequest, StepInput, StepResult, StepTimings

_COMPONENT = "seamline.worker"
Attributes = dict[str, AttributeValue]


def _step_end_ns(timings: StepTimings) -> int:
    spent = timings.prepare_ns + timings.forward_ns + timings.sample_ns
    return timings.started_unix_ns + spent


@dataclass(slots=True)
class _Phase:
    """The prefill or the decode of one request so far."""

    name: str
    start_ns: int
    end_ns: int
    steps: int = 0
    tokens: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    chunks: list[tuple[int, Attributes]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)


@dataclass(slots=True)
class _RequestTrace:
    """A traced request of the batch."""

    request_id: str
    parent: Context
    resumed: bool
    phase: _Phase

    def end_phase(self, error: ServiceError | None = None) -> None:
        """Makes the span of the current phase, if any step ran in it."""
        phase = self.phase
        if phase.steps == 0 and error is None:
            return
        attributes: Attributes = {
            "gen_ai.request.id": self.request_id,
            "seamline.tokens": phase.tokens,
            "seamline.steps": phase.steps,
            "seamline.forward_ms": phase.forward_ns / 1e6,
            "seamline.sample_ms": phase.sample_ns / 1e6,
            "seamline.resumed": self.resumed,
        }
        span = tracer(_COMPONENT).start_span(
            phase.name,
            context=self.parent,
            attributes=attributes,
            links=phase.links,
            start_time=phase.start_ns,
        )
        for time_ns, chunk in phase.chunks:
            span.add_event("chunk", chunk, timestamp=time_ns)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error.message))
        span.end(end_time=phase.end_ns)


class StepTracer:
    """The traced requests of one stream. Belongs to the event loop."""

    def __init__(self) -> None:
        self._requests: dict[int, _RequestTrace] = {}

    def observe(self, step: StepInput, result: StepResult) -> None:
        """Accounts a finished step to its traced requests."""
        for handle in (*step.finished_handles, *step.preempted_handles):
            self._end(handle)
        for new in step.new_requests:
            if new.traceparent is not None:
                self._requests[new.handle] = _begin(new, result.timings)
        if not self._requests and not step.trace_step:
            return
        scheduled = _scheduled_tokens(step)
        link = self._step_span(scheduled, result) if step.trace_step else None
        sampled = dict(zip(result.handles, result.num_sampled_tokens, strict=True))
        for handle, num_tokens in scheduled.items():
            trace = self._requests.get(handle)
            if trace is not None:
                _account(trace, num_tokens, sampled.get(handle, 0), result.timings, link)
        for handle, error in result.failed.items():
            self._end(handle, error)

    def close(self) -> None:
        """Makes the spans of all requests that are left."""
        for handle in list(self._requests):
            self._end(handle)

    def _end(self, handle: int, error: ServiceError | None = None) -> None:
        trace = self._requests.pop(handle, None)
        if trace is not None:
            trace.end_phase(error)

    def _step_span(self, scheduled: dict[int, int], result: StepResult) -> Link:
        """Makes the step's span; returns the link to it."""
        timings = result.timings
        traced = [self._requests[handle] for handle in scheduled if handle in self._requests]
        attributes: Attributes = {
            "seamline.step": result.step,
            "seamline.requests": len(scheduled),
            "seamline.tokens": sum(scheduled.values()),
            "seamline.queue_ms": timings.queue_ns / 1e6,
            "seamline.prepare_ms": timings.prepare_ns / 1e6,
            "seamline.forward_ms": timings.forward_ns / 1e6,
            "seamline.sample_ms": timings.sample_ns / 1e6,
        }
        span: Span = tracer(_COMPONENT).start_span(
            "worker.step",
            context=Context(),
            attributes=attributes,
            links=[Link(_parent_of(trace)) for trace in traced],
            start_time=timings.started_unix_ns,
        )
        span.end(end_time=_step_end_ns(timings))
        return Link(span.get_span_context())


def _begin(new: NewRequest, timings: StepTimings) -> _RequestTrace:
    start_ns = timings.started_unix_ns
    phase = _Phase("worker.prefill", start_ns, start_ns)
    return _RequestTrace(new.request_id, context_from_headers(new.traceparent), new.resumed, phase)


def _parent_of(trace: _RequestTrace) -> SpanContext:
    return get_current_span(trace.parent).get_span_context()


def _scheduled_tokens(step: StepInput) -> dict[int, int]:
    """Tokens per handle."""
    tokens = {new.handle: new.num_scheduled_tokens for new in step.new_requests}
    cached = step.cached
    tokens.update(zip(cached.handles.tolist(), cached.num_scheduled_tokens.tolist(), strict=True))
    return tokens


def _account(
    trace: _RequestTrace, num_tokens: int, num_sampled: int, timings: StepTimings, link: Link | None
) -> None:
    """Adds a step to a request's phase; the first sampled token ends its prefill."""
    phase = trace.phase
    phase.end_ns = _step_end_ns(timings)
    phase.steps += 1
    phase.forward_ns += timings.forward_ns
    phase.sample_ns += timings.sample_ns
    if link is not None:
        phase.links.append(link)
    if phase.name == "worker.decode":
        phase.tokens += num_sampled
        return
    phase.tokens += num_tokens
    phase.chunks.append((phase.end_ns, {"seamline.tokens": num_tokens}))
    if num_sampled:
        trace.end_phase()
        trace.phase = _Phase("worker.decode", phase.end_ns, phase.end_ns)
