"""The flags of `seamline serve`, and which of them each service gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field
from pydantic_settings import CliSuppress

from enginecore.settings import EnginecoreSettings
from gateway.settings import GatewaySettings
from services import embedded_model
from services.settings import ServiceSettings
from worker.settings import WorkerSettings

SERVICES: Final[Mapping[str, type[ServiceSettings]]] = {
    "worker": WorkerSettings,
    "enginecore": EnginecoreSettings,
    "gateway": GatewaySettings,
}
"""In the order of starting: each calls the one before it."""
_ENV_PREFIX: Final = "SEAMLINE_"


class StackSettings(GatewaySettings, EnginecoreSettings, WorkerSettings):
    """The flags of all services, and the launcher's own."""

    model: str = Field(
        "",
        description="A GGUF file, a directory with safetensors, or a hub id; unset: the embedded "
        "SmolLM2-135M-Instruct",
    )
    listen_address: str = Field("127.0.0.1:50051", description="Where the gateway's gRPC listens")
    metrics_port: int = Field(
        0, description="Port of the enginecore's /metrics, the worker's is the next one; 0: none"
    )
    run_dir: Path | None = Field(
        None, description="Folder of the Unix sockets between the services; unset: a temporary one"
    )
    single_process: bool = Field(
        False, description="Run all services in one process, still over the wire, for a debugger"
    )
    # the launcher wires these itself
    enginecore_address: CliSuppress[str] = ""
    worker_address: CliSuppress[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The settings of each service, by field name."""

    values: Mapping[str, Mapping[str, Any]]

    def environment(self, service: str, base: Mapping[str, str]) -> dict[str, str]:
        """A service's environment: `base` without other services' settings, and its own."""
        kept = {k: v for k, v in base.items() if not k.startswith(_ENV_PREFIX)}
        own = {_ENV_PREFIX + k.upper(): _text(v) for k, v in self.values[service].items()}
        return kept | own

    def settings(self, service: str) -> ServiceSettings:
        """A service's settings, for running it in this process."""
        return SERVICES[service](**self.values[service])


def plan(settings: StackSettings, run_dir: Path) -> StackPlan:
    """Divides the launcher's settings among the services.

    Args:
        settings: the launcher's.
        run_dir: an existing folder for the sockets.
    """
    # what a YAML file said is among the values: the services need not read it again
    given = {name: getattr(settings, name) for name in settings.model_fields_set - {"config"}}
    worker, core = (f"unix:{run_dir}/{name}.sock" for name in ("worker", "enginecore"))
    model = settings.model or str(embedded_model.path_in(settings.cache_dir))
    metrics = settings.metrics_port
    wired: dict[str, dict[str, Any]] = {
        "worker": {"listen_address": worker, "metrics_port": metrics and metrics + 1},
        "enginecore": {
            "listen_address": core,
            "worker_address": (worker,),
            "metrics_port": metrics,
        },
        "gateway": {
            "listen_address": settings.listen_address,
            "enginecore_address": core,
            "metrics_port": 0,
        },
    }
    for name, fields in wired.items():
        wanted = SERVICES[name].model_fields
        fields.update({k: v for k, v in given.items() if k in wanted and k not in fields})
        if "model" in wanted:
            fields["model"] = model
    return StackPlan(wired)


def _text(value: Any) -> str:  # noqa: ANN401 - settings are of many types
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
