"""The enginecore's spans of a request's trace.

    enginecore.request   received → finished
    ├── enginecore.queue    received → first scheduled
    ├── enginecore.prefill  first scheduled → first token
    └── enginecore.decode   first token → last token

The parts are drawn from the request's timestamps when they are over. Events (chunk, preempted,
resumed) go to the part in which they happen. A request that is not sampled costs one dictionary
look-up at each end of its life.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from enginecore.clock import Clock
from enginecore.request import FinishedRequest, FinishReason, Request
from enginecore.scheduler_output import SchedulerOutput
from services.telemetry import context_from_headers, traceparent_of, tracer

Attributes = Mapping[str, str | int | float]

_NS = 1e-9


class _RequestTrace:
    """The open spans of one sampled request."""

    __slots__ = ("decode", "preempted", "prefill", "root")

    def __init__(self, root: Span) -> None:
        self.root = root
        self.prefill: Span | None = None
        self.decode: Span | None = None
        self.preempted = False

    @property
    def part(self) -> Span:
        """The innermost open span."""
        return self.decode or self.prefill or self.root


class RequestTracer:
    """Draws the spans of all sampled requests. The engine's task calls it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tracer = tracer("enginecore")
        self._live: dict[int, _RequestTrace] = {}

    def begin(self, request: Request, tracestate: str | None, attributes: Attributes) -> None:
        """Opens the request's span below its `traceparent`, which becomes the span's own."""
        root = self._tracer.start_span(
            "enginecore.request",
            context=context_from_headers(request.traceparent, tracestate),
            kind=trace.SpanKind.SERVER,
            start_time=request.arrival_ns,
        )
        request.traceparent = traceparent_of(root) or request.traceparent
        if root.is_recording():
            root.set_attributes({"gen_ai.request.id": request.request_id, **attributes})
            self._live[request.handle] = _RequestTrace(root)

    def on_scheduled(self, output: SchedulerOutput, requests: Mapping[int, Request]) -> None:
        """Notes what the step does with sampled requests."""
        if not self._live:
            return
        now_ns = self._clock.now_ns()
        for handle in output.preempted_handles:
            self._on_preempted(handle, output.step, now_ns)
        for new in output.scheduled_new_reqs:
            live = self._live.get(new.handle)
            if live is not None:
                self._on_joined(live, requests[new.handle], output.step, now_ns)
                self._on_chunk(live, output.step, new.num_scheduled_tokens, now_ns)
        cached = output.scheduled_cached_reqs
        for handle, count in zip(cached.handles, cached.num_scheduled_tokens, strict=True):
            live = self._live.get(handle)
            # In decode, a chunk is a recomputation; single tokens are not worth an event.
            if live is not None and (live.decode is None or count > 1):
                self._on_chunk(live, output.step, count, now_ns)

    def _on_preempted(self, handle: int, step: int, now_ns: int) -> None:
        live = self._live.get(handle)
        if live is not None:
            live.preempted = True
            live.part.add_event("preempted", {"step": step}, timestamp=now_ns)

    def _on_joined(self, live: _RequestTrace, request: Request, step: int, now_ns: int) -> None:
        context = trace.set_span_in_context(live.root)
        if live.prefill is None:
            queue = self._tracer.start_span(
                "enginecore.queue", context=context, start_time=request.arrival_ns
            )
            queue.end(end_time=request.scheduled_ns)
            live.prefill = self._tracer.start_span(
                "enginecore.prefill", context=context, start_time=request.scheduled_ns
            )
            live.prefill.set_attribute("num_cached_tokens", request.num_cached_tokens or 0)
        elif live.preempted:
            live.part.add_event("resumed", {"step": step}, timestamp=now_ns)
        live.preempted = False

    def _on_chunk(self, live: _RequestTrace, step: int, count: int, now_ns: int) -> None:
        live.part.add_event("chunk", {"step": step, "num_tokens": count}, timestamp=now_ns)

    @property
    def has_live(self) -> bool:
        """Whether any live request is sampled."""
        return bool(self._live)

    def on_tokens(self, request: Request) -> None:
        """At the first token, ends prefill and begins decode."""
        live = self._live.get(request.handle)
        if live is None or live.decode is not None or live.prefill is None:
            return
        live.prefill.end(end_time=request.first_token_ns)
        live.decode = self._tracer.start_span(
            "enginecore.decode",
            context=trace.set_span_in_context(live.root),
            start_time=request.first_token_ns,
        )

    def on_finished(self, finished: FinishedRequest) -> None:
        """Ends the request's spans, however it ended."""
        request = finished.request
        live = self._live.pop(request.handle, None)
        if live is None:
            return
        if live.decode is not None:
            live.decode.end(end_time=request.last_token_ns)
        elif live.prefill is not None:
            live.prefill.end(end_time=request.finished_ns)
        live.root.set_attributes(_usage(request))
        live.root.set_attribute("gen_ai.response.finish_reasons", [finished.finish_reason.value])
        if finished.finish_reason is FinishReason.ERROR and finished.error is not None:
            live.root.set_attribute("error.type", finished.error.code.value)
            live.root.set_status(Status(StatusCode.ERROR, finished.error.message))
        live.root.end(end_time=request.finished_ns)


def _usage(request: Request) -> dict[str, int | float]:
    """Counts and durations, under vLLM's attribute names; durations are in seconds."""
    attributes: dict[str, int | float] = {
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": request.num_output_tokens,
        "seamline.num_preemptions": request.num_preemptions,
    }
    arrival, scheduled = request.arrival_ns, request.scheduled_ns
    first, last = request.first_token_ns, request.last_token_ns
    if request.finished_ns is not None:
        attributes["gen_ai.latency.e2e"] = (request.finished_ns - arrival) * _NS
    if scheduled is not None:
        attributes["gen_ai.latency.time_in_queue"] = (scheduled - arrival) * _NS
    if scheduled is not None and first is not None and last is not None:
        attributes["gen_ai.latency.time_to_first_token"] = (first - arrival) * _NS
        attributes["gen_ai.latency.time_in_model_prefill"] = (first - scheduled) * _NS
        attributes["gen_ai.latency.time_in_model_decode"] = (last - first) * _NS
        attributes["gen_ai.latency.time_in_model_inference"] = (last - scheduled) * _NS
    return attributes
