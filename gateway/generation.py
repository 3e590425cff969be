"""From validated requests to streams of text: the path that HTTP and gRPC share.

    prompts x n -> one EngineRequest per choice (choice index = prompt_i * n + j, seed + j)
    -> one submit, admitted all or none -> deltas -> ChoiceProcessor per choice -> TextDeltas

A `Generation` must be closed; closing aborts what the engine still runs.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from opentelemetry.trace import SpanKind

from gateway.engine_client import EngineClient, EngineInfo, RequestGroup
from gateway.errors import ContextLengthError
from gateway.metrics import GatewayMetrics, RequestRecord
from gateway.output_processor import ChoiceProcessor, OutputOptions, TextDelta
from gateway.request import (
    EngineDelta,
    EngineRequest,
    Finished,
    FinishReason,
    RequestStats,
    SamplingParams,
)
from gateway.tokenizer import Tokenizer
from gateway.tracing import RequestTrace, mark_cancelled, mark_error
from services.errors import InvalidArgumentError, ServiceError, UnavailableError
from services.telemetry import traceparent_of

log = logging.getLogger(__name__)

ABORT_ACK_TIMEOUT_S: Final = 2.0
"""How long a choice that a stop string ended waits for the engine's counts of it."""
_INT64_RANGE: Final = 2**64
_MAX_SEED: Final = 2**63 - 1


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """A request, validated but for what the model decides.

    Attributes:
        request_id: names it in logs and traces, and its choices at the engine.
        prompts: token ids of each.
        n: choices per prompt.
        timeout_ms: from now; None: no limit.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: OutputOptions = field(default_factory=OutputOptions)
    n: int = 1
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    timeout_ms: int | None = None


@dataclass(slots=True, frozen=True)
class Usage:
    """Token counts of a request; each prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def child_seed(seed: int, j: int) -> int:
    """The seed of choice `j` of a prompt: the next int64 after the last is the first."""
    wrapped = (seed + j) % _INT64_RANGE
    return wrapped - _INT64_RANGE if wrapped > _MAX_SEED else wrapped


class TextGenerator:
    """Starts generations on one engine.

    Args:
        engine: the engine.
        tokenizer: of its model.
        metrics: counts what happens.
        max_choices: most sequences of one request.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        max_choices: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._max_choices = max_choices
        self._live_ids: set[str] = set()

    def check(self, request: GenerationRequest) -> EngineInfo:
        """Checks what depends on the model.

        Errors: UnavailableError before the engine was ready once; InvalidArgumentError and its
        ContextLengthError, naming the parameter.
        """
        info = self._engine.info
        if info is None:
            raise UnavailableError(self._engine.availability.reason or "the engine is starting")
        if len(request.prompts) * request.n > self._max_choices:
            raise InvalidArgumentError(
                f"prompts times n must be at most {self._max_choices}", param="n"
            )
        for prompt in request.prompts:
            _check_prompt(prompt, request.sampling.max_tokens, info)
        for param in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            _check_ids(getattr(request.sampling, param), param, info)
        return info

    def start(self, request: GenerationRequest, trace: RequestTrace) -> "Generation":
        """Sends a request to the engine.

        Errors: as `check`, and UnavailableError when the engine is away.
        """
        self.check(request)
        generation = Generation(request, trace, self._tokenizer, self._metrics)
        base_id = self._free_id(request)
        try:
            group = self._engine.submit(generation.engine_requests(base_id))
        except ServiceError as error:
            generation.fail(error)
            raise
        self._live_ids.add(base_id)
        generation.run(group, lambda: self._live_ids.discard(base_id))
        return generation

    def _free_id(self, request: GenerationRequest) -> str:
        """The request's id, or one made of it if a live request has it: clients may repeat ids."""
        if request.request_id not in self._live_ids:
            return request.request_id
        return f"{request.request_id}-{random.getrandbits(32):08x}"


def _check_prompt(prompt: Sequence[int], max_tokens: int | None, info: EngineInfo) -> None:
    if not prompt:
        raise InvalidArgumentError("the prompt is empty", param="prompt")
    _check_ids(prompt, "prompt", info)
    limit, length = info.max_model_len, len(prompt)
    if length >= limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, but the prompt has {length} "
            "tokens and leaves no room for output.",
            param="prompt",
        )
    if max_tokens is not None and length + max_tokens > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, but {length + max_tokens} "
            f"were requested: {length} in the prompt and {max_tokens} in max_tokens.",
            param="max_tokens",
        )


def _check_ids(ids: Collection[int], param: str, info: EngineInfo) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        raise InvalidArgumentError(
            f"token ids must be 0 to {info.vocab_size - 1} in {param}", param=param
        )


class Generation:
    """One request on its way; made by `TextGenerator.start`. One task reads `deltas`."""

    def __init__(
        self,
        request: GenerationRequest,
        trace: RequestTrace,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
    ) -> None:
        self.request = request
        self._trace = trace
        self._metrics = metrics
        self._span = trace.start("gateway.generate", SpanKind.CLIENT)
        self._started = time.monotonic()
        self._group: RequestGroup | None = None
        self._on_close: Callable[[], None] | None = None
        self._is_closed = False
        self._error: ServiceError | None = None
        count = len(request.prompts) * request.n
        self._choices = [
            ChoiceProcessor(
                i,
                tokenizer.detokenizer(
                    request.prompts[i // request.n],
                    skip_special_tokens=request.skip_special_tokens,
                ),
                request.output,
            )
            for i in range(count)
        ]
        self._last_token_at: list[float | None] = [None] * count
        self._ttft_s: float | None = None
        self._stats = [RequestStats()] * count

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits; None when there is no trace."""
        return self._trace.trace_id

    @property
    def usage(self) -> Usage:
        """The counts so far; cached tokens are known when a prompt's first choice is finished."""
        n = self.request.n
        return Usage(
            sum(map(len, self.request.prompts)),
            sum(choice.num_tokens for choice in self._choices),
            sum(stats.num_cached_tokens for stats in self._stats[::n]),
        )

    def engine_requests(self, base_id: str) -> list[EngineRequest]:
        """One per choice, in order of the choices' indices."""
        request = self.request
        seed = request.sampling.seed
        first_seed = random.getrandbits(63) if seed is None else seed
        traceparent = traceparent_of(self._span)
        return [
            EngineRequest(
                request_id=base_id if len(self._choices) == 1 else f"{base_id}-{i}",
                prompt_token_ids=request.prompts[i // request.n],
                sampling=replace(request.sampling, seed=child_seed(first_seed, i % request.n)),
                priority=request.priority,
                timeout_ms=request.timeout_ms,
                cache_salt=request.cache_salt,
                traceparent=traceparent,
                tracestate=self._trace.tracestate,
            )
            for i in range(len(self._choices))
        ]

    def run(self, group: RequestGroup, on_close: Callable[[], None]) -> None:
        """Takes the engine's side of it."""
        self._group, self._on_close = group, on_close

    async def deltas(self) -> AsyncGenerator[list[TextDelta]]:
        """What there is to show, as it comes. Closing the iterator aborts what still runs.

        Errors: the engine's; the request is over then.
        """
        try:
            while any(choice.finish_reason is None for choice in self._choices):
                shown = self._take(await self._next())
                if shown:
                    yield shown
            await self._settle()
        except ServiceError as error:
            self._error = error
            raise
        finally:
            self.close()

    def fail(self, error: ServiceError) -> None:
        """Ends a generation that never reached the engine."""
        self._error = error
        self.close()

    def close(self) -> None:
        """Aborts what still runs and records the end; more than once does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._group is not None:
            self._group.abort()
        if self._on_close is not None:
            self._on_close()
        self._record()

    async def _next(self) -> list[EngineDelta]:
        assert self._group is not None
        return await self._group.next()

    async def _settle(self) -> None:
        """Waits for the engine's word on choices that a stop string ended here."""
        assert self._group is not None
        try:
            async with asyncio.timeout(ABORT_ACK_TIMEOUT_S):
                while self._group.num_unread:
                    self._take(await self._next())
        except TimeoutError:
            log.warning("no acknowledgement of an abort", extra=self._log_fields())

    def _take(self, news: Sequence[EngineDelta]) -> list[TextDelta]:
        now = time.monotonic()
        shown: list[TextDelta] = []
        for delta in news:
            choice = self._choices[delta.index]
            if delta.finished is not None:
                self._stats[delta.index] = delta.finished.stats
                self._check_end(delta.finished, choice)
            text = choice.process(delta)
            if text is None:
                continue
            shown.append(text)
            self._observe(delta.index, len(text.token_ids), now)
            if text.finish_reason is not None and delta.finished is None:
                assert self._group is not None
                self._group.abort([delta.index])
        return shown

    def _check_end(self, finished: Finished, choice: ChoiceProcessor) -> None:
        if choice.finish_reason is not None:
            return
        if finished.error is not None:
            raise finished.error
        if finished.reason is FinishReason.ABORT:
            raise UnavailableError("the engine aborted the request")

    def _observe(self, index: int, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        before = self._last_token_at[index]
        self._last_token_at[index] = now
        if before is None:
            ttft_s = now - self._started
            self._ttft_s = ttft_s if self._ttft_s is None else self._ttft_s
            prompt = self.request.prompts[index // self.request.n]
            self._metrics.observe_first_token(ttft_s, len(prompt))
        self._metrics.observe_tokens(num_tokens, None if before is None else now - before)

    def _outcome(self, choice: ChoiceProcessor) -> FinishReason:
        if choice.finish_reason is not None:
            return choice.finish_reason
        return FinishReason.ABORT if self._error is None else FinishReason.ERROR

    def _record(self) -> None:
        e2e_s = time.monotonic() - self._started
        reasons = [self._outcome(choice) for choice in self._choices]
        for i, choice in enumerate(self._choices):
            self._metrics.observe_finished(
                RequestRecord(
                    reason=reasons[i],
                    e2e_s=e2e_s,
                    num_prompt_tokens=len(self.request.prompts[i // self.request.n]),
                    num_tokens=choice.num_tokens,
                    n=self.request.n,
                    max_tokens=self.request.sampling.max_tokens,
                    stats=self._stats[i],
                )
            )
        self._end_span(reasons)
        log.info(
            "request finished",
            extra={
                **self._log_fields(),
                "finish_reasons": ",".join(reasons),
                "duration_s": round(e2e_s, 4),
            },
        )

    def _end_span(self, reasons: Sequence[FinishReason]) -> None:
        usage = self.usage
        self._span.set_attribute("gen_ai.request.id", self.request.request_id)
        self._span.set_attribute("gen_ai.usage.prompt_tokens", usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.completion_tokens", usage.completion_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", list(reasons))
        if self._error is not None:
            mark_error(self._span, self._error)
        elif FinishReason.ABORT in reasons:
            mark_cancelled(self._span)
            mark_cancelled(self._trace.span)
        self._span.end()

    def _log_fields(self) -> dict[str, object]:
        usage = self.usage
        return {
            "request_id": self.request.request_id,
            "trace_id": self._trace.trace_id,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "ttft_s": None if self._ttft_s is None else round(self._ttft_s, 4),
            "error": self._error.code if self._error else None,
        }
