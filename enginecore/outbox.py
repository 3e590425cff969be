"""What waits to be sent to one client."""

import asyncio
from typing import Final

from enginecore.scheduler_output import EngineCoreOutput
from services.errors import ServiceError

_MAX_PENDING_REQUESTS: Final = 4096
"""A client with this many unread answers is not heard until it reads some."""


class Outbox:
    """Collects a client's outputs; one entry per request, however slowly the client reads.

    The engine puts and never waits; one handler takes. Tokens of a request that are not taken yet
    are merged, so what is held is bounded by the client's requests.

    Args:
        hold_prompt_logprobs: do not hand out parts of a prompt's log-probabilities before a token
            or the end comes with them.
    """

    def __init__(self, hold_prompt_logprobs: bool = False) -> None:
        self._hold_prompt_logprobs = hold_prompt_logprobs
        self._pending: dict[int, EngineCoreOutput] = {}
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.handles: dict[int, int] = {}
        """The engine's handle of each live request, by the client's."""
        self.is_open = True
        self._error: ServiceError | None = None

    def put(self, client_handle: int, output: EngineCoreOutput) -> None:
        """Adds what one step brought for a request."""
        pending = self._pending.get(client_handle)
        if pending is None:
            self._pending[client_handle] = output
        else:
            _merge(pending, output)
        if output.finished is not None:
            self.handles.pop(client_handle, None)
        if len(self._pending) >= _MAX_PENDING_REQUESTS:
            self._room.clear()
        if output.new_token_ids or output.finished is not None or not self._hold_prompt_logprobs:
            self._ready.set()

    def wake(self) -> None:
        """Makes the handler look, though there may be nothing to take."""
        self._ready.set()

    def close(self, error: ServiceError | None = None) -> None:
        """Nothing comes any more: `take` raises `error` once everything was taken."""
        self.is_open = False
        self._error = error
        self._room.set()
        self._ready.set()

    async def take(self) -> dict[int, EngineCoreOutput]:
        """Waits until woken; everything that came, by the client's handle, perhaps nothing.

        Errors: the one that the outbox was closed with.
        """
        await self._ready.wait()
        if self._error is not None and not self._pending:
            raise self._error
        self._ready.clear()
        taken, self._pending = self._pending, {}
        self._room.set()
        if self._error is not None:
            self._ready.set()
        return taken

    async def wait_for_room(self) -> None:
        """Waits until the client has read enough to be heard again."""
        await self._room.wait()


def _merge(pending: EngineCoreOutput, output: EngineCoreOutput) -> None:
    pending.new_token_ids += output.new_token_ids
    if output.logprobs is not None:
        if pending.logprobs is None:
            pending.logprobs = output.logprobs
        else:
            pending.logprobs.extend(output.logprobs)
    if output.prompt_logprobs is not None:
        if pending.prompt_logprobs is None:
            pending.prompt_logprobs = output.prompt_logprobs
        else:
            pending.prompt_logprobs.extend(output.prompt_logprobs)
    if output.finished is not None:
        pending.finished = output.finished
