from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest

from enginecore.engine import Engine
from enginecore.metrics import register_metrics
from tests.unit.enginecore.builders import make_request, make_scheduler, run_step


def test_counters_equal_what_ran_g2() -> None:
    """G2"""
    scheduler = make_scheduler()
    scheduler.add_requests([make_request(i, 20, max_tokens=3) for i in range(1, 11)])
    run_step(scheduler)
    registry = CollectorRegistry()
    engine = SimpleNamespace(scheduler=scheduler, options=SimpleNamespace(model="m"))
    register_metrics(cast(Engine, engine), registry)

    def value(name: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m"})

    assert value("vllm:num_requests_running") == 10
    while scheduler.requests:
        run_step(scheduler)
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:num_requests_waiting") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:prompt_tokens_total") == 200
    assert value("vllm:generation_tokens_total") == 30
    assert value("vllm:prefix_cache_queries_total") == 200
    assert b"vllm:num_preemptions_total" in generate_latest(registry)


def test_nothing_before_the_scheduler_exists() -> None:
    registry = CollectorRegistry()
    engine = SimpleNamespace(scheduler=None, options=SimpleNamespace(model="m"))
    register_metrics(cast(Engine, engine), registry)
    assert generate_latest(registry) == b""
