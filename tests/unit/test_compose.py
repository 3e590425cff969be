"""The compose files, the Dockerfile and the settings classes agree on names and ports."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from enginecore.settings import EnginecoreSettings
from gateway.settings import GatewaySettings
from services.settings import ServiceSettings
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "enginecore": EnginecoreSettings,
    "worker": WorkerSettings,
}
ASSIGNMENT = re.compile(r"(SEAMLINE_[A-Z_]+)=(\S+)")


def read_yaml(path: str) -> dict[str, Any]:
    value = yaml.safe_load((ROOT / path).read_text())
    assert isinstance(value, dict)
    return value


def image_environment(target: str) -> dict[str, str]:
    """What the Dockerfile's stage of a service sets."""
    text = (ROOT / "services/Dockerfile").read_text()
    stage = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    assert stage, f"no stage {target}"
    return dict(ASSIGNMENT.findall(stage))


def compose_environment(service: str) -> set[str]:
    names: set[str] = set()
    for file in COMPOSE_FILES:
        names |= set(read_yaml(file)["services"].get(service, {}).get("environment", {}))
    return names


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_a_setting_of_its_service(service: str) -> None:
    given = compose_environment(service) | set(image_environment(service))
    names = {name.removeprefix("SEAMLINE_").lower() for name in given if "SEAMLINE_" in name}
    assert names
    assert names <= set(SETTINGS[service].model_fields)


@pytest.mark.parametrize("service", SETTINGS)
def test_every_required_setting_is_given(service: str) -> None:
    given = compose_environment(service) | set(image_environment(service))
    fields = SETTINGS[service].model_fields.items()
    required = {f"SEAMLINE_{name.upper()}" for name, field in fields if field.is_required()}
    assert required <= given


@pytest.mark.parametrize("service", SETTINGS)
def test_prometheus_scrapes_the_port_that_the_image_serves(service: str) -> None:
    image = image_environment(service)
    port = image.get("SEAMLINE_METRICS_PORT") or image["SEAMLINE_PORT"]
    jobs = read_yaml("deploy/prometheus/prometheus.yml")["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets[service] == [f"{service}:{port}"]


@pytest.mark.parametrize(
    ("caller", "callee"), [("gateway", "enginecore"), ("enginecore", "worker")]
)
def test_each_service_calls_the_next_where_it_listens(caller: str, callee: str) -> None:
    environment = read_yaml("docker-compose.yml")["services"][caller]["environment"]
    port = image_environment(callee)["SEAMLINE_LISTEN_ADDRESS"].rpartition(":")[2]
    assert environment[f"SEAMLINE_{callee.upper()}_ADDRESS"] == f"{callee}:{port}"


def test_the_documentation_lists_every_variable() -> None:
    text = "".join((ROOT / file).read_text() for file in COMPOSE_FILES)
    used = set(re.findall(r"\$\{(\w+)", text)) | set(re.findall(r"(?m)^ +([A-Z][A-Z_]+):$", text))
    page = (ROOT / "docs/deployment.md").read_text()
    assert {name for name in used if f"`{name}`" not in page} == set()
