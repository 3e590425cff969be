import pytest

from gateway.engine_client import SchedulerStats
from gateway.metrics import GatewayMetrics, RequestRecord, token_buckets
from gateway.request import FinishReason, RequestStats

LABELS = 'engine="0",model_name="m"'
# what vLLM's dashboards and alerts name, by type
NAMES = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"],
    "counter": [
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
    ],
    "histogram": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ],
}


def _values(metrics: GatewayMetrics, stats: SchedulerStats | None = None) -> dict[str, float]:
    page = metrics.render(stats or SchedulerStats()).decode()
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("kind", list(NAMES))
def test_vllms_names_and_types_g2(kind: str) -> None:
    page = GatewayMetrics("m").render(SchedulerStats()).decode()
    for name in NAMES[kind]:
        assert f"# TYPE vllm:{name} {kind}\n" in page


def test_engine_counters_survive_the_engines_restart() -> None:
    """A counter never falls; an engine that starts again counts from zero."""
    metrics = GatewayMetrics("m")
    name = f"vllm:prefix_cache_queries_total{{{LABELS}}}"
    seen = [
        _values(metrics, SchedulerStats(prefix_cache_queries=count))[name]
        for count in (100, 150, 150, 30, 40)
    ]
    assert seen == [100, 150, 150, 180, 190]


def test_gauges_follow_the_engine() -> None:
    values = _values(GatewayMetrics("m"), SchedulerStats(3, 2, 0.25))
    assert values[f"vllm:num_requests_running{{{LABELS}}}"] == 3
    assert values[f"vllm:num_requests_waiting{{{LABELS}}}"] == 2
    assert values[f"vllm:kv_cache_usage_perc{{{LABELS}}}"] == 0.25


def test_intervals_come_from_the_engines_times_and_are_never_negative_g2() -> None:
    stats = RequestStats(
        queued_unix_ns=10**18,
        scheduled_unix_ns=10**18 + 2 * 10**9,
        first_token_unix_ns=10**18 + 5 * 10**9,
        last_token_unix_ns=10**18 + 4 * 10**9,
    )
    metrics = GatewayMetrics("m")
    metrics.observe_finished(RequestRecord(FinishReason.STOP, 9.0, 4, 3, 1, None, stats))
    values = _values(metrics)
    assert values[f"vllm:request_queue_time_seconds_sum{{{LABELS}}}"] == 2
    assert values[f"vllm:request_prefill_time_seconds_sum{{{LABELS}}}"] == 3
    assert values[f"vllm:request_decode_time_seconds_sum{{{LABELS}}}"] == 0
    assert values[f"vllm:request_prompt_tokens_sum{{{LABELS}}}"] == 4
    assert values[f"vllm:request_params_max_tokens_count{{{LABELS}}}"] == 0


def test_a_request_that_never_ran_has_no_intervals() -> None:
    metrics = GatewayMetrics("m")
    metrics.observe_finished(
        RequestRecord(FinishReason.ABORT, 0.1, 4, 0, 1, 8, RequestStats(queued_unix_ns=10**18))
    )
    values = _values(metrics)
    assert values[f"vllm:request_queue_time_seconds_count{{{LABELS}}}"] == 0
    assert values[f"vllm:e2e_request_latency_seconds_count{{{LABELS}}}"] == 1


def test_token_buckets() -> None:
    assert token_buckets(250) == [1, 2, 5, 10, 20, 50, 100, 200]
