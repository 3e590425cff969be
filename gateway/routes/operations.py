"""Models, probes, metrics and the tokenizer."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from gateway.core import GatewayCore
from gateway.errors import error_body, error_headers
from gateway.middleware import call_of
from gateway.openai_output import dump
from gateway.routes.body import read_object
from gateway.schemas.body import validate
from gateway.schemas.tokenization import DetokenizeBody, TokenizeBody
from services.errors import InvalidArgumentError, UnavailableError


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers=headers, media_type="application/json")


def _unavailable(reason: str) -> Response:
    error = UnavailableError(reason)
    return _json({"status": "unavailable", **error_body(error)}, 503, error_headers(error))


def add_model_routes(app: FastAPI, core: GatewayCore) -> None:
    """What is served."""

    def card(name: str) -> dict[str, Any]:
        info = core.engine.info
        return {
            "id": name,
            "object": "model",
            "created": core.models.created_unix_s,
            "owned_by": "seamline",
            "root": core.root,
            "parent": None,
            "max_model_len": info.max_model_len if info else None,
        }

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in core.models.names]})

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        return _json(card(core.models.resolve(name)))


_PROBE_METHODS: Final = ["GET", "HEAD"]
"""Some balancers probe by HEAD."""


def add_probe_routes(app: FastAPI, core: GatewayCore) -> None:
    """Health, metrics, load."""

    @app.api_route("/health", methods=_PROBE_METHODS)
    async def health() -> Response:
        state = core.engine.availability
        return _unavailable(state.reason) if state.dead else _json({"status": "ok"})

    @app.api_route("/ready", methods=_PROBE_METHODS)
    async def ready() -> Response:
        state = core.engine.availability
        return _json({"status": "ready"}) if state.ready else _unavailable(state.reason)

    @app.get("/metrics")
    async def metrics() -> Response:
        page = core.metrics.render(core.engine.stats)
        return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    @app.get("/version")
    async def get_version() -> Response:
        try:
            number = version("seamline")
        except PackageNotFoundError:  # run from a source tree that was not installed
            number = "unknown"
        return _json({"version": number})

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": core.num_in_flight})


def add_tokenizer_routes(app: FastAPI, core: GatewayCore) -> None:
    """Text to ids and back."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = validate(TokenizeBody, await read_object(request, core.max_request_bytes))
        core.models.resolve(body.model)
        trace = call_of(request).trace
        if body.messages is not None:
            ids = await core.encoder.encode_chat(
                [message.for_template(i) for i, message in enumerate(body.messages)],
                trace,
                add_generation_prompt=body.add_generation_prompt is not False,
                extra=body.chat_template_kwargs,
            )
        else:
            ids = await core.encoder.encode_text(
                body.prompt or "", trace, add_special_tokens=body.add_special_tokens is not False
            )
        limit = core.max_model_len()
        return _json({"tokens": ids, "count": len(ids), "max_model_len": limit})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = validate(DetokenizeBody, await read_object(request, core.max_request_bytes))
        core.models.resolve(body.model)
        tokenizer = core.encoder.tokenizer
        if any(token >= tokenizer.vocab_size for token in body.tokens):
            raise InvalidArgumentError(
                f"token ids must be below {tokenizer.vocab_size}", param="tokens"
            )
        return _json({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})
