"""A process's own /metrics page, for services without an HTTP server of their own."""

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from services.errors import UnavailableError


def serve_metrics(host: str, port: int, registry: CollectorRegistry = REGISTRY) -> None:
    """Serves `registry` in a daemon thread; port 0 means off.

    Errors: UnavailableError when the port is in use.
    """
    if port == 0:
        return
    try:
        start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UnavailableError(f"cannot serve metrics on {host}:{port}: {error}") from error
