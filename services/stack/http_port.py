"""The HTTP port of a stack, settled before anything is started.

The launcher asks that port whether its gateway is ready: another server there would answer for it.
"""

import socket

from services.errors import UnavailableError


def settle_port(host: str, port: int) -> int:
    """The port that the gateway is going to listen on; for 0 a free one.

    Errors: UnavailableError when it cannot listen there.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            # as the gateway does: connections of an earlier one that linger are no obstacle
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            settled: int = probe.getsockname()[1]
    except OSError as error:
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return settled
