"""An EngineService without a model: its tokens are a pure function of the request.

The text of a request is `script(request)`; without one it is its seed's letters, so that equal
seeds give equal text. A request resumes after its `output_token_ids`, as a real engine's would.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seamline.common.v1 import output_pb2
from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.errors import UnimplementedError
from services.server import GrpcServer
from tests.fakes.tokenizer import EOS_ID, VOCAB_SIZE, byte_ids

SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
MAX_MODEL_LEN = 512
DEFAULT_TOKENS = 16


def letters(request: engine_pb2.EngineCoreRequest) -> list[int]:
    """Text that the seed and the prompt's last token decide; it never ends by itself."""
    start = request.sampling_params.seed + request.prompt_token_ids[-1]
    return byte_ids("".join(chr(ord("a") + (start * 7 + i * i) % 26) for i in range(64)))


def text_script(text: str, *, ends: bool = True) -> Callable[[Any], list[int]]:
    """A script that writes this text and, unless told otherwise, the end of sequence."""
    ids = byte_ids(text) + ([EOS_ID] if ends else [])
    return lambda request: ids


@dataclass
class FakeRequest:
    """A request at the fake."""

    handle: int
    request: engine_pb2.EngineCoreRequest
    script: list[int]
    num_output: int
    outbox: "asyncio.Queue[engine_pb2.ConnectResponse]"


@dataclass
class FakeEngine(engine_pb2_grpc.EngineServiceServicer):
    """The servicer; tests set its fields and read its records.

    Attributes:
        script: the output tokens of a request; None: `letters`.
        tokens_per_step: tokens that each step gives.
        step_s: time between steps, in seconds.
        refuse: the error that adds are answered with.
        fail_after: a request fails with INTERNAL once it has this many output tokens.
        hold: while set, no request moves.
        added: every request that was added, in order.
        num_aborted: requests that were aborted.
    """

    script: Callable[[engine_pb2.EngineCoreRequest], list[int]] | None = None
    tokens_per_step: int = 1
    step_s: float = 0.0
    state: "engine_pb2.EngineState.ValueType" = engine_pb2.ENGINE_STATE_READY
    refuse: output_pb2.RequestError | None = None
    fail_after: int | None = None
    hold: bool = False
    added: list[engine_pb2.EngineCoreRequest] = field(default_factory=list)
    num_add_messages: int = 0
    num_aborted: int = 0
    live: dict[tuple[int, int], FakeRequest] = field(default_factory=dict)
    _num_sessions: int = 0
    _server: GrpcServer | None = None

    async def start(self, socket: Path) -> str:
        """Listens; returns the address."""
        self._server = GrpcServer(f"unix:{socket}", services=[SERVICE_NAME])
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server.grpc)
        await self._server.start()
        return self._server.address

    async def stop(self) -> None:
        """Ends all streams at once, as a crash does."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
        self.live.clear()

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Any
    ) -> engine_pb2.GetEngineInfoResponse:
        """A small model's facts."""
        return engine_pb2.GetEngineInfoResponse(
            engine_id="fake",
            epoch=1,
            state=self.state,
            status_message="" if self.state == engine_pb2.ENGINE_STATE_READY else "being a fake",
            model="fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_ID],
        )

    async def Connect(
        self, messages: AsyncIterator[engine_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[engine_pb2.ConnectResponse]:
        """A session."""
        self._num_sessions += 1
        session = self._num_sessions
        outbox: asyncio.Queue[engine_pb2.ConnectResponse] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read(session, messages, outbox)),
            asyncio.create_task(self._step(session, outbox)),
        ]
        try:
            while True:
                yield await outbox.get()
        finally:
            for task in tasks:
                task.cancel()
            for key in [key for key in self.live if key[0] == session]:
                self.num_aborted += 1
                del self.live[key]

    async def WatchScheduler(
        self, request: engine_pb2.WatchSchedulerRequest, context: Any
    ) -> AsyncIterator[engine_pb2.WatchSchedulerResponse]:
        """The count of live requests, often."""
        while True:
            stats = engine_pb2.SchedulerStats(
                num_running_reqs=len(self.live), prefix_cache_queries=100, prefix_cache_hits=40
            )
            yield engine_pb2.WatchSchedulerResponse(stats=stats)
            await asyncio.sleep(0.02)

    def Generate(self, request: Any, context: Any) -> Any:
        """Not what a gateway uses, like the three below."""
        raise UnimplementedError("not faked")

    def WatchRequests(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("not faked")

    def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("not faked")

    def Drain(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("not faked")

    async def _read(
        self,
        session: int,
        messages: AsyncIterator[engine_pb2.ConnectRequest],
        outbox: "asyncio.Queue[engine_pb2.ConnectResponse]",
    ) -> None:
        async for message in messages:
            match message.WhichOneof("payload"):
                case "hello":
                    welcome = engine_pb2.Welcome(engine_id="fake", epoch=1)
                    outbox.put_nowait(engine_pb2.ConnectResponse(welcome=welcome))
                case "add":
                    self.num_add_messages += 1
                    self._add(session, message.add.requests, outbox)
                case "abort":
                    self._abort(session, message.abort.handles, outbox)

    def _add(self, session: int, requests: Any, outbox: Any) -> None:
        for added in requests:
            self.added.append(added.request)
            if self.refuse is not None:
                finished = engine_pb2.FinishedRequest(
                    handle=added.handle,
                    finish_reason=output_pb2.FINISH_REASON_ERROR,
                    error=self.refuse,
                )
                outbox.put_nowait(_outputs([], [finished]))
                continue
            assert (session, added.handle) not in self.live
            script = (self.script or letters)(added.request)
            num_output = len(added.request.output_token_ids)
            self.live[session, added.handle] = FakeRequest(
                added.handle, added.request, script, num_output, outbox
            )

    def _abort(self, session: int, handles: Any, outbox: Any) -> None:
        for handle in handles:
            live = self.live.pop((session, handle), None)
            if live is not None:
                self.num_aborted += 1
                end = _finished(live, output_pb2.FINISH_REASON_ABORT)
                outbox.put_nowait(_outputs([], [end]))

    async def _step(self, session: int, outbox: Any) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.hold:
                await asyncio.sleep(0.005)
                continue
            moved, ended = [], []
            for key in [key for key in self.live if key[0] == session]:
                live = self.live[key]
                tokens, end = self._advance(live)
                moved.append((live.handle, tokens))
                if end is not None:
                    del self.live[key]
                    ended.append(end)
            if moved:
                outbox.put_nowait(_outputs(moved, ended))
            else:
                await asyncio.sleep(0.002)

    def _advance(self, live: FakeRequest) -> tuple[list[int], engine_pb2.FinishedRequest | None]:
        params = live.request.sampling_params
        limit = params.max_tokens if params.HasField("max_tokens") else DEFAULT_TOKENS
        if self.fail_after is not None and live.num_output >= self.fail_after:
            return [], _finished(live, output_pb2.FINISH_REASON_ERROR)
        tokens: list[int] = []
        while len(tokens) < self.tokens_per_step and live.num_output < limit:
            token = live.script[live.num_output % len(live.script)]
            tokens.append(token)
            live.num_output += 1
            if token == EOS_ID and not params.ignore_eos:
                return tokens, _finished(live, output_pb2.FINISH_REASON_STOP)
            if token in params.stop_token_ids:
                return tokens, _finished(live, output_pb2.FINISH_REASON_STOP, token)
        if live.num_output >= limit:
            return tokens, _finished(live, output_pb2.FINISH_REASON_LENGTH)
        return tokens, None


def _finished(
    live: FakeRequest,
    reason: "output_pb2.FinishReason.ValueType",
    stop_token_id: int | None = None,
) -> engine_pb2.FinishedRequest:
    now = time.time_ns()
    error = None
    if reason == output_pb2.FINISH_REASON_ERROR:
        error = output_pb2.RequestError(
            code=output_pb2.REQUEST_ERROR_CODE_INTERNAL, message="secret of the inside"
        )
    stats = engine_pb2.RequestStats(
        num_prompt_tokens=len(live.request.prompt_token_ids),
        num_cached_tokens=len(live.request.prompt_token_ids) // 2,
        num_output_tokens=live.num_output,
        queued_unix_ns=now - 4_000_000,
        scheduled_unix_ns=now - 3_000_000,
        first_token_unix_ns=now - 2_000_000,
        last_token_unix_ns=now - 1_000_000,
        finished_unix_ns=now,
    )
    return engine_pb2.FinishedRequest(
        handle=live.handle,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        error=error,
        stats=stats,
    )


def _outputs(
    moved: list[tuple[int, list[int]]], ended: list[engine_pb2.FinishedRequest]
) -> engine_pb2.ConnectResponse:
    outputs = engine_pb2.EngineCoreOutputs(
        epoch=1,
        step=1,
        handles=[handle for handle, tokens in moved if tokens],
        num_new_tokens=[len(tokens) for _, tokens in moved if tokens],
        new_token_ids=[token for _, tokens in moved for token in tokens],
        finished=ended,
    )
    return engine_pb2.ConnectResponse(outputs=outputs)
