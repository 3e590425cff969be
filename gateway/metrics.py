"""The gateway's metrics, under vLLM's names, types and buckets, so that its dashboards work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.engine_client import SchedulerStats
from gateway.request import FinishReason, RequestStats

ENGINE_LABEL: Final = "0"
_LABELS: Final = ("model_name", "engine")
_NS_PER_S: Final = 1e9
_TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_N: Final = (1, 2, 5, 10, 20)
_COUNTERS: Final = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache",
    "prefix_cache_hits": "Tokens found in the prefix cache",
    "num_preemptions": "Preemptions",
    "prompt_tokens": "Prompt tokens of requests that began to answer",
    "generation_tokens": "Tokens generated",
}
_GAUGES: Final = {
    "num_requests_running": "Requests that hold KV blocks",
    "num_requests_waiting": "Requests that wait",
    "kv_cache_usage_perc": "Used share of the KV cache, 1 is all of it",
}
_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": ("Receipt to first token", _TTFT_S),
    "inter_token_latency_seconds": ("Between tokens", _ITL_S),
    "request_time_per_output_token_seconds": ("Mean time between a request's tokens", _ITL_S),
    "e2e_request_latency_seconds": ("Receipt to end", _LATENCY_S),
    "request_queue_time_seconds": ("In the engine's queue", _LATENCY_S),
    "request_inference_time_seconds": ("First scheduled to last token", _LATENCY_S),
    "request_prefill_time_seconds": ("First scheduled to first token", _LATENCY_S),
    "request_decode_time_seconds": ("First to last token", _LATENCY_S),
    "request_params_n": ("The parameter n", _N),
}
_TOKEN_HISTOGRAMS: Final = {
    "request_prompt_tokens": "Prompt tokens of a request",
    "request_generation_tokens": "Tokens generated for a request",
    "request_params_max_tokens": "The parameter max_tokens",
}


def token_buckets(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `longest`."""
    buckets: list[int] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > longest:
                return buckets
            buckets.append(mantissa * power)
        power *= 10


@dataclass(slots=True, frozen=True)
class RequestRecord:
    """One finished sequence.

    Attributes:
        e2e_s: receipt to end, in seconds.
        num_tokens: output tokens that its client got.
    """

    reason: FinishReason
    e2e_s: float
    num_prompt_tokens: int
    num_tokens: int
    n: int
    max_tokens: int | None
    stats: RequestStats


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own.

    Args:
        model_name: the label.
        max_model_len: bounds the token histograms' buckets.
    """

    def __init__(self, model_name: str, max_model_len: int = 32_768) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._seen = SchedulerStats()
        labels = (model_name, ENGINE_LABEL)
        self._counters = {
            name: Counter(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*labels)
            for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*labels)
            for name, text in _GAUGES.items()
        }
        tokens = {
            name: (text, token_buckets(max_model_len)) for name, text in _TOKEN_HISTOGRAMS.items()
        }
        self._histograms = {
            name: self._histogram(name, text, buckets)
            for name, (text, buckets) in {**_HISTOGRAMS, **tokens}.items()
        }
        self._success = Counter(
            "vllm:request_success",
            "Finished requests",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in FinishReason:
            self._success.labels(*labels, reason.value)
        self._responses = Counter(
            "seamline:http_responses",
            "HTTP responses by route and status",
            ("route", "status"),
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model_name, ENGINE_LABEL)

    def observe_first_token(self, ttft_s: float, num_prompt_tokens: int) -> None:
        """A sequence got its first token."""
        self._histograms["time_to_first_token_seconds"].observe(ttft_s)
        self._counters["prompt_tokens"].inc(num_prompt_tokens)

    def observe_tokens(self, num_tokens: int, since_last_s: float | None) -> None:
        """A sequence got tokens, this long after the previous ones (None: the first)."""
        self._counters["generation_tokens"].inc(num_tokens)
        if since_last_s is not None and num_tokens:
            self._histograms["inter_token_latency_seconds"].observe(since_last_s / num_tokens)

    def observe_finished(self, record: RequestRecord) -> None:
        """A sequence ended."""
        label = (self._model_name, ENGINE_LABEL, record.reason.value)
        self._success.labels(*label).inc()
        observed = {
            "e2e_request_latency_seconds": record.e2e_s,
            "request_prompt_tokens": record.num_prompt_tokens,
            "request_generation_tokens": record.num_tokens,
            "request_params_n": record.n,
            "request_params_max_tokens": record.max_tokens,
            **_intervals(record.stats, record.num_tokens),
        }
        for name, value in observed.items():
            if value is not None:
                self._histograms[name].observe(value)

    def observe_response(self, route: str, status: int) -> None:
        """A response was begun."""
        self._responses.labels(route, str(status)).inc()

    def render(self, stats: SchedulerStats) -> bytes:
        """The page, with the engine's load as last heard."""
        self._gauges["num_requests_running"].set(stats.num_running_reqs)
        self._gauges["num_requests_waiting"].set(stats.num_waiting_reqs)
        self._gauges["kv_cache_usage_perc"].set(stats.kv_cache_usage_ratio)
        for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
            now, before = getattr(stats, name), getattr(self._seen, name)
            # an engine that restarted counts from zero again
            self._counters[name].inc(now - before if now >= before else now)
        self._seen = stats
        return generate_latest(self._registry)


def _intervals(stats: RequestStats, num_tokens: int) -> dict[str, float | None]:
    """A sequence's phases in seconds, by the engine's clock; None for one it did not reach."""

    def between(start: int | None, end: int | None) -> float | None:
        return None if not start or not end else max(0, end - start) / _NS_PER_S

    decode_s = between(stats.first_token_unix_ns, stats.last_token_unix_ns)
    per_token = decode_s / (num_tokens - 1) if decode_s is not None and num_tokens > 1 else None
    return {
        "request_queue_time_seconds": between(stats.queued_unix_ns, stats.scheduled_unix_ns),
        "request_prefill_time_seconds": between(stats.scheduled_unix_ns, stats.first_token_unix_ns),
        "request_decode_time_seconds": decode_s,
        "request_inference_time_seconds": between(
            stats.scheduled_unix_ns, stats.last_token_unix_ns
        ),
        "request_time_per_output_token_seconds": per_token,
    }
