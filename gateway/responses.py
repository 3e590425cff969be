"""ASGI responses that stop their work when the client leaves.

Each runs its body beside a watch of the connection. Whichever ends first ends the other; a
cancelled body closes its generation, which aborts it in the engine.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import error_body
from gateway.generation import Generation, Usage
from gateway.openai_output import DONE, AnswerFormat, event
from services.errors import InternalError, ServiceError

log = logging.getLogger(__name__)

_NO_BUFFERING: Final = {
    "cache-control": "no-cache",
    # nginx would collect the events otherwise
    "x-accel-buffering": "no",
}


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GenerationResponse(Response, ABC):
    """Sends one generation's answer.

    Args:
        generation: running; closed by this response.
        answer: how it is written.
        headers: further headers.
    """

    def __init__(
        self, generation: Generation, answer: AnswerFormat, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers=headers, media_type=self.media_type)
        self._generation = generation
        self._answer = answer
        # the length is not known yet
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        body = asyncio.create_task(self.respond(send))
        watch = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait({body, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            if not body.done():
                body.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await body
            self._generation.close()

    @abstractmethod
    async def respond(self, send: Send) -> None:
        """Sends the answer. Errors: ServiceError, only while nothing was sent."""

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class WholeResponse(GenerationResponse):
    """An answer in one piece."""

    media_type = "application/json"

    async def respond(self, send: Send) -> None:
        """See `GenerationResponse`."""
        deltas = [delta async for news in self._generation.deltas() for delta in news]
        content = self._answer.whole(deltas, self._generation.usage)
        length = (b"content-length", str(len(content)).encode())
        await self._start(send, [*self.raw_headers, length])
        await send({"type": "http.response.body", "body": content})


class EventStreamResponse(GenerationResponse):
    """An answer as server-sent events.

    The status is sent with the first event, so that an error before it has its own status.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, answer: AnswerFormat, headers: Mapping[str, str]
    ) -> None:
        super().__init__(generation, answer, {**headers, **_NO_BUFFERING})
        self._is_started = False

    async def respond(self, send: Send) -> None:
        """See `GenerationResponse`."""
        try:
            async with contextlib.aclosing(self._generation.deltas()) as deltas:
                async for news in deltas:
                    await self._send(send, self._answer.chunks(news, self._usage))
            end = self._answer.last_chunk(self._generation.usage)
        except Exception as error:  # the stream must end by the protocol whatever happened
            if not self._is_started:
                raise
            end = self._error_event(error)
        await self._send(send, end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error_event(self, error: Exception) -> bytes:
        if not isinstance(error, ServiceError):
            log.error("a stream failed", exc_info=error)
            error = InternalError("a stream failed")
        return event(error_body(error, self._generation.trace_id)) + DONE

    def _usage(self) -> Usage:
        return self._generation.usage

    async def _send(self, send: Send, content: bytes) -> None:
        if not content:
            return
        if not self._is_started:
            self._is_started = True
            await self._start(send, self.raw_headers)
        await send({"type": "http.response.body", "body": content, "more_body": True})
