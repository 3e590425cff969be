"""engine.v1's servicer: check, call, map, reply."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from enginecore import client_wire, validation, watch
from enginecore.engine import Engine
from enginecore.request import Request
from enginecore.session import Session
from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.errors import InvalidArgumentError

_Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one engine. engine.proto tells what each call does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(  # noqa: D102 - engine.proto tells
        self, request: engine_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[engine_pb2.GenerateResponse]:
        engine = self._engine
        single = self._single_request(request.request, context)
        outbox = engine.clients.open(hold_prompt_logprobs=True)
        try:
            engine.submit(outbox, [(1, single)])
            while True:
                output = (await outbox.take()).get(1)
                if output is None:
                    continue
                if output.finished is not None and output.finished.error is not None:
                    raise output.finished.error
                yield client_wire.generate_response(output)
                if output.finished is not None:
                    return
        finally:
            # Also when the client left or its deadline passed, which arrive as CancelledError.
            engine.detach(outbox)

    def _single_request(self, message: engine_pb2.EngineCoreRequest, context: _Context) -> Request:
        """Checks a request whose trace and deadline may come with the call."""
        engine = self._engine
        facts = engine.check_accepting()
        validation.check_request(message, facts)
        if not message.HasField("traceparent"):
            metadata = dict(context.invocation_metadata() or ())
            message.traceparent = str(metadata.get("traceparent", ""))
            message.tracestate = str(metadata.get("tracestate", ""))
        remaining_s = context.time_remaining()
        deadline_ns = (
            engine.clock.now_ns() + int(remaining_s * 1e9) if remaining_s is not None else None
        )
        return client_wire.receive_request(engine, message, facts, deadline_ns)

    async def Connect(  # noqa: D102 - engine.proto tells
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: _Context
    ) -> AsyncGenerator[engine_pb2.ConnectResponse]:
        engine = self._engine
        engine.check_accepting()
        first = await anext(aiter(request_iterator), engine_pb2.ConnectRequest())
        if first.WhichOneof("payload") != "hello":
            raise InvalidArgumentError("the first message must be hello", param="hello")
        outbox = engine.clients.open()
        session = Session(engine, outbox)
        listener = asyncio.create_task(session.listen(request_iterator))
        try:
            welcome = engine_pb2.Welcome(engine_id=engine.engine_id, epoch=engine.epoch)
            yield engine_pb2.ConnectResponse(welcome=welcome)
            async for response in session.responses():
                yield response
        finally:
            listener.cancel()
            engine.detach(outbox)

    async def GetEngineInfo(  # noqa: D102 - engine.proto tells
        self, request: engine_pb2.GetEngineInfoRequest, context: _Context
    ) -> engine_pb2.GetEngineInfoResponse:
        return client_wire.engine_info(self._engine)

    async def WatchScheduler(  # noqa: D102 - engine.proto tells
        self, request: engine_pb2.WatchSchedulerRequest, context: _Context
    ) -> AsyncGenerator[engine_pb2.WatchSchedulerResponse]:
        interval_s = watch.interval_s(request)
        last = None
        while True:
            view = watch.scheduler_view(self._engine)
            if view != last:
                last = view
                yield view
            await asyncio.sleep(interval_s)

    async def WatchRequests(  # noqa: D102 - engine.proto tells
        self, request: engine_pb2.WatchRequestsRequest, context: _Context
    ) -> AsyncGenerator[engine_pb2.WatchRequestsResponse]:
        interval_s = watch.interval_s(request)
        while True:
            yield watch.requests_view(self._engine)
            await asyncio.sleep(interval_s)

    async def ResetPrefixCache(  # noqa: D102 - engine.proto tells
        self, request: engine_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> engine_pb2.ResetPrefixCacheResponse:
        reset = await self._engine.reset_prefix_cache()
        return engine_pb2.ResetPrefixCacheResponse(reset=reset)

    async def Drain(  # noqa: D102 - engine.proto tells
        self, request: engine_pb2.DrainRequest, context: _Context
    ) -> engine_pb2.DrainResponse:
        timeout_s = request.timeout_ms / 1000 if request.HasField("timeout_ms") else None
        return engine_pb2.DrainResponse(num_aborted=await self._engine.drain(timeout_s))
