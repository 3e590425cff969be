"""Channels between the services, the options both ends share, and how to wait for a peer."""

import random
from typing import Final

import grpc

from services.errors import BY_CODE, ErrorCode, InternalError, ServiceError
from services.interceptor import PARAM_METADATA_KEY

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Bounds one message; grpc's default of 4 MiB is less than a large prompt list takes."""
KEEPALIVE_TIME_MS: Final = 10_000
"""A dead peer over TCP is noticed within time + timeout. Unix sockets notice at once."""
KEEPALIVE_TIMEOUT_MS: Final = 5_000

# grpc ignores an option whose name it does not know, hence one list of names, each with its reason.
_SHARED_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # pings go on for as long as the stream is idle: an idle engine must notice a lost worker too
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    # a shared subchannel would tie a new lease to the socket of the old one
    ("grpc.use_local_subchannel_pool", 1),
    # our own backoff decides when to call again; grpc's reconnect must not be slower than it
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # unix sockets and container names must never go through an HTTP proxy of the environment
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    # a second process on the same TCP port would steal half of the calls
    ("grpc.so_reuseport", 0),
    # clients ping every KEEPALIVE_TIME_MS; grpc's default would answer that with GOAWAY
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain-text channel.

    Args:
        address: `host:port` or `unix:/path`.
    """
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


class Backoff:
    """Exponential waiting with full jitter on its upper half, for reconnects.

    Args:
        first_s: the first wait's upper end, in seconds.
        longest_s: the bound of the growth, in seconds.
    """

    def __init__(self, first_s: float = 0.05, longest_s: float = 1.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        """How long to wait before the next try."""
        delay = self._next_s
        self._next_s = min(2 * delay, self._longest_s)
        return random.uniform(delay / 2, delay)

    def reset(self) -> None:
        """Starts over, after a success."""
        self._next_s = self._first_s


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The `ServiceError` that a peer's status stands for; an unknown status counts as internal."""
    name = error.code().name
    cls = BY_CODE[ErrorCode(name)] if name in ErrorCode.__members__ else InternalError
    trailing = error.trailing_metadata() or ()
    params = [str(value) for key, value in trailing if key == PARAM_METADATA_KEY]
    return cls(error.details() or name, param=params[0] if params else None)
