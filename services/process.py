"""What turns a service into a process: event loop, signals, exit code."""

import asyncio
import ctypes
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

import uvloop

from services.errors import ServiceError
from services.logging import configure_logging
from services.metrics import serve_metrics
from services.settings import ServiceSettings, load_settings
from services.telemetry import configure_telemetry, shutdown_telemetry

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
PARENT_FLAG: Final = "--die-with-parent"
"""Given by the launcher, whose death the process must not outlive."""


class RunningService(Protocol):
    """A started service."""

    async def wait(self) -> None:
        """Returns when the service ends by itself; raises ServiceError when it cannot go on."""

    async def stop(self) -> None:
        """Drains and ends; called once."""


S = TypeVar("S", bound=ServiceSettings)


def run_service(
    name: str,
    settings_class: type[S],
    start: Callable[[S], Awaitable[RunningService]],
    argv: Sequence[str] | None = None,
) -> None:
    """Runs one service until SIGTERM or SIGINT, then exits: 0, or 1 with one line that says why.

    Args:
        name: the service, as logs and traces name it.
        settings_class: what the command line, the environment and YAML are read into.
        start: makes the service listen.
        argv: the command line; unset: the process's own.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if PARENT_FLAG in args:
        args.remove(PARENT_FLAG)
        _die_with_parent()
    try:
        settings = load_settings(settings_class, args, prog=f"python -m {name}")
        configure_logging(settings.log_level, settings.log_format, service=name)
        configure_telemetry(f"seamline-{name}")
        serve_metrics(settings.metrics_host, settings.metrics_port)
        uvloop.run(_until_signalled(name, settings, start))
    except ServiceError as error:
        print(f"{name}: {error.message}", file=sys.stderr, flush=True)  # noqa: T201 - the last word
        sys.exit(1)
    finally:
        shutdown_telemetry()


async def _until_signalled(
    name: str, settings: S, start: Callable[[S], Awaitable[RunningService]]
) -> None:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    starting = asyncio.ensure_future(start(settings))
    stopping = asyncio.create_task(signalled.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return
    service = await starting
    log.info("%s started", name, extra={"settings": _shown(settings)})
    ended = asyncio.create_task(service.wait())
    await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
    log.info("%s stops", name)
    await service.stop()
    if ended.done():
        await ended
    else:
        ended.cancel()


def _shown(settings: ServiceSettings) -> dict[str, object]:
    """What differs from the defaults, for the log, without what is secret."""
    chosen = settings.model_dump(exclude_defaults=True, mode="json")
    return {k: "***" if "key" in k else v for k, v in chosen.items()}


def _die_with_parent() -> None:
    """Asks the kernel for SIGTERM when the launcher dies, however it dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
