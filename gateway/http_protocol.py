"""The HTTP server's protocol with what uvicorn's own lacks: bounds on a request's head.

A client that sends an endless head, or one byte of it a minute, would hold memory or a connection
for as long as it likes. Bodies have their own bounds, in `routes.body`.
"""

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers; beyond it, and what one read brings besides, the connection ends."""
HEAD_TIMEOUT_S: Final = 30.0
"""From a connection's start, or a request's first byte, until its head must be complete."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head over the bounds ends it, with a 400 if nothing else is being sent."""

    _head_bytes = 0
    _in_head = True
    _is_all_head = False
    """Nothing but a head was in the latest read."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what came; ends the connection when that is no end of a head that is too long."""
        if self._in_head and self._head_timer is None:
            self._start_timer()  # the next request of a connection that was kept alive
        self._is_all_head = self._in_head
        super().data_received(data)
        if self._is_all_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse("The request's headers are too large.")

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = self._is_all_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next byte begins another head."""
        super().on_message_complete()
        self._in_head = True

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(
            HEAD_TIMEOUT_S, self._refuse, "The request's headers did not arrive in time."
        )

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, reason: str) -> None:
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(reason)
        else:
            # an answer is under way, into which no other can be cut
            self.transport.close()
