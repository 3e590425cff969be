"""Each service gets its own settings and no others' (DESIGN §10)."""

from pathlib import Path

import pytest

from enginecore.settings import EnginecoreSettings
from gateway.settings import GatewaySettings
from services.settings import load_settings
from services.stack.settings import StackSettings, plan
from worker.settings import WorkerSettings

RUN_DIR = Path("/run/seamline")


def settings(*argv: str) -> StackSettings:
    return load_settings(StackSettings, argv, prog="seamline serve")


def test_a_flag_reaches_only_the_service_that_uses_it() -> None:
    given = settings(
        *("--api-key", "a,b", "--max-num-seqs", "7", "--num-threads", "3"),
        *("--log-level", "debug", "--no-enable-prefix-caching"),
    )
    stack = plan(given, RUN_DIR)
    own = {name: set(values) for name, values in stack.values.items()}
    assert "api_key" in own["gateway"]
    assert own["enginecore"] >= {"max_num_seqs", "enable_prefix_caching", "model", "log_level"}
    assert own["worker"] >= {"num_threads", "log_level"}
    assert not {"api_key", "num_threads", "port"} & own["enginecore"]
    assert not {"api_key", "max_num_seqs", "model"} & own["worker"]
    assert not {"max_num_seqs", "num_threads"} & own["gateway"]


def test_what_travels_by_environment_arrives_as_it_was() -> None:
    stack = plan(settings("--api-key", "a,b", "--max-model-len", "512"), RUN_DIR)
    for name, cls in (
        ("gateway", GatewaySettings),
        ("enginecore", EnginecoreSettings),
        ("worker", WorkerSettings),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for key, value in stack.environment(name, {}).items():
                patch.setenv(key, value)
            arrived = load_settings(cls, (), prog=name)
            assert arrived.model_dump() == stack.settings(name).model_dump()


def test_other_services_variables_are_taken_away() -> None:
    base = {"PATH": "/bin", "SEAMLINE_API_KEY": "secret", "SEAMLINE_MAX_NUM_SEQS": "3"}
    environment = plan(settings(), RUN_DIR).environment("worker", base)
    assert environment["PATH"] == "/bin"
    assert not {"SEAMLINE_API_KEY", "SEAMLINE_MAX_NUM_SEQS"} & set(environment)


def test_environment_and_yaml_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("block-size: 32\nserved-model-name: [mine]\n")
    monkeypatch.setenv("SEAMLINE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("SEAMLINE_CONFIG", str(path))
    stack = plan(settings(), RUN_DIR)
    assert stack.values["enginecore"]["max_num_seqs"] == 5
    assert stack.values["enginecore"]["block_size"] == 32
    assert stack.values["gateway"]["served_model_name"] == ("mine",)
    assert "SEAMLINE_CONFIG" not in stack.environment("gateway", {"SEAMLINE_CONFIG": str(path)})


def test_the_sockets_meet() -> None:
    values = plan(settings(), RUN_DIR).values
    assert values["gateway"]["enginecore_address"] == values["enginecore"]["listen_address"]
    assert values["enginecore"]["worker_address"] == (values["worker"]["listen_address"],)


def test_metrics_ports_do_not_collide() -> None:
    values = plan(settings("--metrics-port", "9100"), RUN_DIR).values
    ports = [values[name]["metrics_port"] for name in ("gateway", "enginecore", "worker")]
    assert ports == [0, 9100, 9101]
