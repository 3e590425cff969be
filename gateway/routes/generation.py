"""POST /v1/chat/completions and /v1/completions."""

import time
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.core import GatewayCore
from gateway.generation import GenerationRequest
from gateway.middleware import HttpCall, call_of
from gateway.openai_output import (
    AnswerFormat,
    AnswerHead,
    AnswerOptions,
    ChatFormat,
    CompletionFormat,
)
from gateway.responses import EventStreamResponse, WholeResponse
from gateway.routes.body import read_object
from gateway.schemas.body import check_supported, ignored_params, validate
from gateway.schemas.chat import ChatCompletionBody
from gateway.schemas.completion import CompletionBody
from gateway.schemas.generation import GenerationBody


def add_generation_routes(app: FastAPI, core: GatewayCore) -> None:
    """The routes that generate."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        value = await read_object(request, core.max_request_bytes)
        check_supported(value, ChatCompletionBody.NEUTRAL)
        body = validate(ChatCompletionBody, value)
        call, model = _admit(core, request, body)
        prompt = await core.encoder.encode_chat(
            body.conversation(),
            call.trace,
            add_generation_prompt=body.add_generation_prompt is not False,
            extra=body.chat_template_kwargs,
        )
        head = _head("chatcmpl", call, model)
        return _respond(core, call, body, [prompt], ChatFormat(head, _options(body)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        value = await read_object(request, core.max_request_bytes)
        check_supported(value, CompletionBody.NEUTRAL)
        body = validate(CompletionBody, value)
        call, model = _admit(core, request, body)
        prompts = [await _prompt_ids(core, call, body, prompt) for prompt in body.prompt]
        echoes = _echoes(core, body, prompts) if body.echo else []
        answer = CompletionFormat(_head("cmpl", call, model), _options(body), echoes)
        return _respond(core, call, body, prompts, answer)


def _admit(core: GatewayCore, request: Request, body: GenerationBody) -> tuple[HttpCall, str]:
    """The call under the body's request id, and the served name of its model."""
    call = call_of(request)
    if body.request_id is not None:
        call.request_id = body.request_id
        call.trace.span.set_attribute("gen_ai.request.id", body.request_id)
    model = core.models.resolve(body.model)
    core.max_model_len()  # refuses before work is done on a prompt that nobody can take
    return call, model


async def _prompt_ids(
    core: GatewayCore, call: HttpCall, body: CompletionBody, prompt: str | list[int]
) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return await core.encoder.encode_text(
        prompt, call.trace, add_special_tokens=body.add_special_tokens is not False
    )


def _echoes(core: GatewayCore, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Each choice's prompt as text."""
    texts = [
        given if isinstance(given, str) else core.encoder.tokenizer.decode(ids)
        for given, ids in zip(body.prompt, prompts, strict=True)
    ]
    return [text for text in texts for _ in range(body.n or 1)]


def _options(body: GenerationBody) -> AnswerOptions:
    return AnswerOptions(body.wants_usage, body.wants_continuous_usage)


def _head(kind: str, call: HttpCall, model: str) -> AnswerHead:
    return AnswerHead(f"{kind}-{call.request_id}", int(time.time()), model)


def _respond(
    core: GatewayCore,
    call: HttpCall,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    answer: AnswerFormat,
) -> Response:
    _set_attributes(call, body)
    generation = core.generator.start(
        GenerationRequest(
            request_id=call.request_id,
            prompts=prompts,
            sampling=body.sampling(),
            output=body.output(),
            n=body.n or 1,
            skip_special_tokens=body.skip_special_tokens is not False,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        ),
        call.trace,
    )
    ignored = ",".join(sorted(set(ignored_params(body)) - body.NEUTRAL.keys()))
    headers = {"x-seamline-ignored-params": _header_value(ignored)} if ignored else {}
    response = EventStreamResponse if body.stream else WholeResponse
    return response(generation, answer, headers)


def _set_attributes(call: HttpCall, body: GenerationBody) -> None:
    given = {
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.max_tokens": body.token_limit,
        "gen_ai.request.n": body.n or 1,
    }
    for name, value in given.items():
        if value is not None:
            call.trace.span.set_attribute(name, value)


def _header_value(names: str) -> str:
    """Client-chosen names, fit for a header."""
    return "".join(c if " " < c <= "~" else "?" for c in names)[:1024]
