"""Checks of a request as it comes from a client. Every message names the field at fault."""

from collections.abc import Iterable, Sequence
from typing import Final

from enginecore.engine_state import EngineFacts
from seamline.common.v1 import sampling_pb2
from seamline.engine.v1 import engine_pb2
from services.errors import InvalidArgumentError, UnimplementedError

MAX_REQUEST_ID_CHARS: Final = 256
MAX_TEXT_CHARS: Final = 1024
"""Bounds cache_salt and the trace headers."""
MAX_LOGPROBS: Final = 20
MAX_LIST_ENTRIES: Final = 1024
"""Bounds stop_token_ids, logit_bias and bad_words, which cost time in every step."""

_RANGES: Final = (
    ("temperature", 0.0, 2.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def check_request(message: engine_pb2.EngineCoreRequest, facts: EngineFacts) -> None:
    """Errors: InvalidArgumentError, UnimplementedError."""
    _require(
        1 <= len(message.request_id) <= MAX_REQUEST_ID_CHARS,
        "request_id",
        f"takes 1 to {MAX_REQUEST_ID_CHARS} characters",
    )
    for name in ("cache_salt", "traceparent", "tracestate"):
        _require(
            len(getattr(message, name)) <= MAX_TEXT_CHARS,
            name,
            f"takes at most {MAX_TEXT_CHARS} characters",
        )
    if message.HasField("lora_name"):
        raise UnimplementedError("lora_name: adapters are not built", param="lora_name")
    vocab_size = facts.model.vocab_size
    _require(len(message.prompt_token_ids) > 0, "prompt_token_ids", "is empty")
    _check_ids("prompt_token_ids", message.prompt_token_ids, vocab_size)
    _check_ids("output_token_ids", message.output_token_ids, vocab_size)
    check_sampling_params(message.sampling_params, vocab_size)


def check_sampling_params(params: sampling_pb2.SamplingParams, vocab_size: int) -> None:
    """Errors: InvalidArgumentError, UnimplementedError."""
    if params.HasField("structured_output"):
        raise UnimplementedError(
            "structured_output: grammars are not built", param="structured_output"
        )
    for name, low, high in _RANGES:
        # Written so that NaN, which compares false, is refused.
        ok = not params.HasField(name) or low <= getattr(params, name) <= high  # type: ignore[arg-type]
        _require(ok, name, f"must be {low:g} to {high:g}")
    if params.HasField("top_p"):
        _require(0 < params.top_p <= 1, "top_p", "must be over 0 and at most 1")
    if params.HasField("repetition_penalty"):
        _require(
            0 < params.repetition_penalty < float("inf"), "repetition_penalty", "must be over 0"
        )
    _check_lengths(params)
    _check_logprobs(params)
    _check_token_lists(params, vocab_size)


def _check_lengths(params: sampling_pb2.SamplingParams) -> None:
    if not params.HasField("max_tokens"):
        return
    _require(params.max_tokens >= 1, "max_tokens", "must be at least 1")
    _require(params.min_tokens <= params.max_tokens, "min_tokens", "must not be over max_tokens")


def _check_logprobs(params: sampling_pb2.SamplingParams) -> None:
    _require(params.logprobs <= MAX_LOGPROBS, "logprobs", f"must be at most {MAX_LOGPROBS}")
    _require(
        params.prompt_logprobs <= MAX_LOGPROBS,
        "prompt_logprobs",
        f"must be at most {MAX_LOGPROBS}",
    )


def _check_token_lists(params: sampling_pb2.SamplingParams, vocab_size: int) -> None:
    for name in ("stop_token_ids", "logit_bias", "bad_words"):
        _require(
            len(getattr(params, name)) <= MAX_LIST_ENTRIES,
            name,
            f"takes at most {MAX_LIST_ENTRIES} entries",
        )
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _require(
        all(-100 <= bias <= 100 for bias in params.logit_bias.values()),
        "logit_bias",
        "must be -100 to 100",
    )
    for sequence in params.bad_words:
        _require(len(sequence.token_ids) > 0, "bad_words", "has an empty sequence")
        _check_ids("bad_words", sequence.token_ids, vocab_size)


def _check_ids(name: str, ids: Sequence[int] | Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    _require(
        largest < vocab_size, name, f"has token {largest}; the vocabulary has {vocab_size} tokens"
    )


def _require(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(f"{name} {message}", param=name)
