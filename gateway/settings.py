"""The gateway's settings; flags have vLLM's names where it has the same one."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.settings import Names, ServiceSettings


class GatewaySettings(ServiceSettings):
    """What `python -m gateway` takes."""

    listen_address: str = Field(
        "127.0.0.1:50051", description="Where gateway.v1 listens: host:port or unix:/path"
    )
    host: str = Field("127.0.0.1", description="Address that the HTTP API listens on")
    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP API; 0: any free one")
    model: str = Field(description="A GGUF file, a folder in Hugging Face's layout, or a hub id")
    tokenizer: str | None = Field(
        None, description="Where the tokenizer is, if not with the model: as --model"
    )
    served_model_name: Names = Field(
        (), description="Names that requests may use; default: one made of the model's"
    )
    chat_template: str | None = Field(
        None, description="A Jinja file, or the template itself, instead of the model's own"
    )
    api_key: Names = Field((), description="Keys that open the API; none: it is open. Repeatable")
    enginecore_address: str = Field(
        "127.0.0.1:50061", description="Where the enginecore listens: host:port or unix:/path"
    )
    engine_unavailable_timeout_s: float = Field(
        30.0, gt=0, description="How long requests wait for an engine that is away, in seconds"
    )
    max_request_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="Largest HTTP body, in bytes"
    )
    max_choices: int = Field(
        256, ge=1, description="Most sequences of one request: prompts times n"
    )
    cache_dir: Path = Field(
        Path("~/.cache/seamline"), description="Where converted tokenizers are kept"
    )
    shutdown_timeout: float = Field(
        10.0, ge=0, description="How long running requests may go on at shutdown, in seconds"
    )
    uvicorn_log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "warning", description="Least severe log lines of the HTTP server itself"
    )
