"""gateway.v1 over the same core as HTTP: check, call, map, reply."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final

import grpc

from gateway.auth import ApiKeys
from gateway.core import GatewayCore
from gateway.engine_messages import WIRE_REASONS
from gateway.generation import Generation, GenerationRequest, Usage
from gateway.output_processor import TextDelta
from gateway.schemas.body import validate
from gateway.schemas.generation import REQUEST_ID_PATTERN, GenerationBody
from gateway.tracing import RequestTrace, mark_cancelled, mark_error, start_request
from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.errors import InvalidArgumentError, ServiceError, UnimplementedError

SERVICE_NAME: Final = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name
_NOT_BUILT: Final = ("bad_words", "logprobs", "prompt_logprobs", "structured_output")
_REQUEST_ID: Final = re.compile(REQUEST_ID_PATTERN)

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """The servicer.

    Args:
        core: shared with HTTP.
        keys: what opens the API.
    """

    def __init__(self, core: GatewayCore, keys: ApiKeys) -> None:
        self._core = core
        self._keys = keys

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> gateway_pb2.GenerateResponse:
        """See the contract."""
        with self._call("Generate", context) as trace:
            generation = await self._start(request.input, context, trace)
            async with aclosing(generation.deltas()) as news:
                deltas = [delta async for batch in news for delta in batch]
            return gateway_pb2.GenerateResponse(
                request_id=generation.request.request_id,
                choices=_choices(deltas),
                usage=_usage(generation.usage),
            )

    async def GenerateStream(
        self, request: gateway_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.GenerateStreamResponse]:
        """See the contract."""
        with self._call("GenerateStream", context) as trace:
            generation = await self._start(request.input, context, trace)
            request_id = generation.request.request_id
            async with aclosing(generation.deltas()) as news:
                async for batch in news:
                    for delta in batch:
                        yield _part(request_id, delta)
            yield gateway_pb2.GenerateStreamResponse(
                request_id=request_id, usage=_usage(generation.usage)
            )

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: Context
    ) -> gateway_pb2.TokenizeResponse:
        """See the contract."""
        with self._call("Tokenize", context) as trace:
            self._core.models.resolve(request.model)
            limit = self._core.max_model_len()
            if request.WhichOneof("input") == "conversation":
                ids = await self._encode_chat(request.conversation, trace)
            elif request.WhichOneof("input") == "text":
                ids = await self._core.encoder.encode_text(request.text, trace)
            else:
                raise InvalidArgumentError("text or conversation must be set", param="input")
            return gateway_pb2.TokenizeResponse(token_ids=ids, max_model_len=limit)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        """See the contract."""
        with self._call("ListModels", context):
            info = self._core.engine.info
            models = self._core.models
            return gateway_pb2.ListModelsResponse(
                models=[
                    gateway_pb2.Model(
                        id=name,
                        max_model_len=info.max_model_len if info else 0,
                        created_unix_s=models.created_unix_s,
                    )
                    for name in models.names
                ]
            )

    @contextmanager
    def _call(self, method: str, context: Context) -> Iterator[RequestTrace]:
        """A call's key check and SERVER span."""
        metadata = _metadata(context)
        trace = start_request(
            f"{SERVICE_NAME}/{method}", metadata.get("traceparent"), metadata.get("tracestate")
        )
        try:
            self._keys.check(metadata.get("authorization"))
            yield trace
        except ServiceError as error:
            mark_error(trace.span, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            mark_cancelled(trace.span)
            raise
        finally:
            trace.span.end()

    async def _start(
        self, message: gateway_pb2.GenerateInput, context: Context, trace: RequestTrace
    ) -> Generation:
        body = _body(message)
        self._core.models.resolve(message.model)
        self._core.max_model_len()  # refuses before work is done on a prompt
        prompt = await self._prompt(message, trace)
        remaining_s = context.time_remaining()
        request = GenerationRequest(
            request_id=body.request_id or uuid.uuid4().hex,
            prompts=[prompt],
            sampling=body.sampling(),
            output=body.output(),
            n=body.n or 1,
            priority=message.priority,
            cache_salt=body.cache_salt,
            timeout_ms=None if remaining_s is None else max(1, int(remaining_s * 1000)),
        )
        trace.span.set_attribute("gen_ai.request.id", request.request_id)
        return self._core.generator.start(request, trace)

    async def _prompt(
        self, message: gateway_pb2.GenerateInput, trace: RequestTrace
    ) -> Sequence[int]:
        match message.WhichOneof("prompt"):
            case "text":
                return await self._core.encoder.encode_text(message.text, trace)
            case "token_ids":
                return list(message.token_ids.ids)
            case "conversation":
                return await self._encode_chat(message.conversation, trace)
        raise InvalidArgumentError("text, token_ids or conversation must be set", param="prompt")

    async def _encode_chat(
        self, conversation: gateway_pb2.Conversation, trace: RequestTrace
    ) -> list[int]:
        if not conversation.messages:
            raise InvalidArgumentError("the conversation is empty", param="messages")
        messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
        return await self._core.encoder.encode_chat(messages, trace)


def _metadata(context: Context) -> Mapping[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _body(message: gateway_pb2.GenerateInput) -> GenerationBody:
    """The input under the HTTP API's limits, whose parameters have the same names."""
    params = message.sampling_params
    for name in _NOT_BUILT:
        is_set = len(params.bad_words) if name == "bad_words" else params.HasField(name)  # type: ignore[arg-type]
        if is_set:
            raise UnimplementedError(f"the parameter {name} is not supported", param=name)
    value = _given(params)
    if message.stop:
        value["stop"] = list(message.stop)
    value["include_stop_str_in_output"] = message.include_stop_str_in_output
    for name in ("n", "request_id", "cache_salt"):
        if message.HasField(name):  # type: ignore[arg-type]
            value[name] = getattr(message, name)
    return validate(GenerationBody, value)


def _given(params: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that are set, as the HTTP API would have them."""
    value: dict[str, Any] = {}
    for field, given in params.ListFields():
        if field.name == "logit_bias":
            value[field.name] = {str(token): bias for token, bias in given.items()}
        elif field.name in ("allowed_token_ids", "stop_token_ids"):
            value[field.name] = list(given)
        else:
            value[field.name] = given
    return value


def _usage(usage: Usage) -> gateway_pb2.Usage:
    return gateway_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _stop_reason(delta: TextDelta) -> gateway_pb2.StopReason | None:
    match delta.stop_reason:
        case str(text):
            return gateway_pb2.StopReason(stop_string=text)
        case int(token_id):
            return gateway_pb2.StopReason(stop_token_id=token_id)
    return None


def _part(request_id: str, delta: TextDelta) -> gateway_pb2.GenerateStreamResponse:
    reason = delta.finish_reason
    return gateway_pb2.GenerateStreamResponse(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=WIRE_REASONS[reason] if reason else output_pb2.FINISH_REASON_UNSPECIFIED,
        stop_reason=_stop_reason(delta),
    )


def _choices(deltas: Sequence[TextDelta]) -> list[gateway_pb2.Choice]:
    choices: dict[int, gateway_pb2.Choice] = {}
    for delta in deltas:
        choice = choices.setdefault(delta.index, gateway_pb2.Choice(index=delta.index))
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        if delta.finish_reason is not None:
            choice.finish_reason = WIRE_REASONS[delta.finish_reason]
            reason = _stop_reason(delta)
            if reason is not None:
                choice.stop_reason.CopyFrom(reason)
    return [choices[index] for index in sorted(choices)]
