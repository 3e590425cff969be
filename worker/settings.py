"""The worker's settings."""

from pathlib import Path

from pydantic import Field

from services.settings import ServiceSettings


class WorkerSettings(ServiceSettings):
    """What the worker process is told; which model to run comes from the enginecore."""

    listen_address: str = Field(
        default="unix:/tmp/seamline/worker.sock",
        description="Where gRPC listens: host:port or unix:/path",
    )
    device: str = Field(default="auto", description="Device to run on: auto or cpu")
    num_threads: int | None = Field(
        default=None, ge=1, description="Threads of torch's operations; unset: the physical cores"
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/seamline"), description="Where converted copies of models are kept"
    )
