"""The engine's numbers for Prometheus, read when they are scraped."""

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from enginecore.engine import Engine


class EngineCollector(Collector):
    """Reads the scheduler's counters; the scraping thread only reads integers.

    The names are vLLM's, where it has the metric.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields nothing before the scheduler exists."""
        scheduler = self._engine.scheduler
        if scheduler is None:
            return
        stats, counters = scheduler.stats(), scheduler.counters
        model = self._engine.options.model
        gauges = {
            "vllm:num_requests_running": ("Requests that hold blocks", stats.num_running_reqs),
            "vllm:num_requests_waiting": ("Requests that wait", stats.num_waiting_reqs),
            "vllm:kv_cache_usage_perc": ("Used share of the blocks", stats.kv_cache_usage_ratio),
        }
        counts = {
            "vllm:num_preemptions": ("Preemptions", counters.num_preemptions),
            "vllm:prompt_tokens": ("Prompt tokens scheduled", counters.prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated", counters.generation_tokens),
            "vllm:prefix_cache_queries": ("Tokens looked up", counters.prefix_cache_queries),
            "vllm:prefix_cache_hits": ("Tokens found", counters.prefix_cache_hits),
            "seamline:rejected_requests": ("Groups refused", counters.num_rejected_reqs),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([model], value)
            yield gauge
        for name, (text, value) in counts.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([model], value)
            yield counter


def register_metrics(engine: Engine, registry: CollectorRegistry = REGISTRY) -> EngineCollector:
    """Adds the engine's numbers to the registry; the collector returned is for taking them out."""
    collector = EngineCollector(engine)
    registry.register(collector)
    return collector
