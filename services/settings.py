"""Settings: one frozen class per process, read once in its `__main__`.

Precedence: flag > `SEAMLINE_*` environment > YAML file (`--config`) > default. Flags are the
fields' names with dashes, and have vLLM EngineArgs' names where it has one. Lists repeat the flag,
or separate values with commas.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from services.errors import InvalidArgumentError, NotFoundError


def _split(value: Any) -> Any:  # noqa: ANN401 - a validator sees anything
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if isinstance(value, list | tuple):
        return [part for item in value for part in _split(item)]
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""The type of a setting that is a list of words."""


def _split_at_commas(value: Any) -> Any:  # noqa: ANN401 - a validator sees anything
    if isinstance(value, str):
        return [part for item in value.split(",") if (part := item.strip())]
    if isinstance(value, list | tuple):
        return [part for item in value for part in _split_at_commas(item)]
    return value


Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_at_commas)]
"""The type of a setting that is a list of addresses: paths of Unix sockets may have spaces."""


class ServiceSettings(BaseSettings):
    """What every process has."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix="SEAMLINE_",
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )
    yaml_values: ClassVar[dict[str, Any]] = {}

    listen_address: str = Field(description="Where gRPC listens: host:port or unix:/path")
    config: str | None = Field(None, description="A YAML file of settings, below flags and env")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines to write"
    )
    log_format: Literal["text", "json"] = Field("text", description="Shape of a log line")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the process's own /metrics; 0: none"
    )
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come first by themselves; then constructor values, environment, YAML."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, cls.yaml_values)


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S], argv: Sequence[str], *, prog: str) -> S:
    """Reads a process's settings.

    Args:
        cls: the settings class.
        argv: the command line without the program; `--help` or an unknown flag exits.
        prog: the program, as `--help` names it.

    Errors: InvalidArgumentError naming each flag at fault; NotFoundError for a missing YAML file.
    """
    head = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    head.add_argument("--config")
    known, _ = head.parse_known_args(list(argv))
    values = _read_yaml(known.config or os.environ.get("SEAMLINE_CONFIG"))
    source = type(cls.__name__, (cls,), {"yaml_values": values})
    try:
        settings: S = source(_cli_parse_args=list(argv), _cli_prog_name=prog)
    except ValidationError as error:
        faults = (
            f"--{str(fault['loc'][0]).replace('_', '-') if fault['loc'] else '?'}: {fault['msg']}"
            for fault in error.errors()
        )
        raise InvalidArgumentError("; ".join(faults)) from error
    return settings


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError as error:
        raise NotFoundError(f"--config: no such file: {path}") from error
    except yaml.YAMLError as error:
        raise InvalidArgumentError(f"--config: {path} is not YAML") from error
    if not isinstance(values, dict):
        raise InvalidArgumentError(f"--config: {path} is not a mapping")
    return {str(name).replace("-", "_"): value for name, value in values.items()}
