"""Which requests may enter the queue."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from enginecore.request import Request
from services.errors import AlreadyExistsError, InvalidArgumentError, ResourceExhaustedError


@dataclass(slots=True, frozen=True)
class AdmissionLimits:
    """Bounds on unfinished requests, running ones included. None: no bound.

    `max_num_queued_tokens` bounds the sum of their prompts' lengths.
    """

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None


NO_LIMITS = AdmissionLimits()


def check_limits(
    requests: Sequence[Request], limits: AdmissionLimits, num_reqs: int, num_tokens: int
) -> None:
    """Admits all of `requests` beside the unfinished ones, or raises ResourceExhaustedError."""
    max_reqs, max_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
    if max_reqs is not None and num_reqs + len(requests) > max_reqs:
        raise ResourceExhaustedError(
            f"the queue is full: {num_reqs} unfinished requests of at most {max_reqs}"
        )
    new_tokens = sum(request.num_prompt_tokens for request in requests)
    if max_tokens is not None and num_tokens + new_tokens > max_tokens:
        raise ResourceExhaustedError(
            f"the queue is full: {num_tokens} prompt tokens of at most {max_tokens}"
        )


def check_request(request: Request, max_model_len: int) -> None:
    """Refuses a request that could never run: at least one output token must fit."""
    if not request.prompt_token_ids:
        raise InvalidArgumentError("prompt_token_ids is empty", param="prompt_token_ids")
    if request.num_prompt_tokens > max_model_len - 1:
        raise InvalidArgumentError(
            f"prompt_token_ids has {request.num_prompt_tokens} tokens, but the context length is "
            f"{max_model_len} tokens, one of them for the output",
            param="prompt_token_ids",
        )
    if request.num_tokens > max_model_len:
        raise InvalidArgumentError(
            f"prompt_token_ids and output_token_ids have {request.num_tokens} tokens, but the "
            f"context length is {max_model_len} tokens",
            param="output_token_ids",
        )


def check_unique(requests: Sequence[Request], live_ids: Container[str]) -> None:
    """Refuses a request whose id a live request, or another one of the same group, has."""
    seen: set[str] = set()
    for request in requests:
        if request.request_id in live_ids or request.request_id in seen:
            raise AlreadyExistsError(
                f"request_id {request.request_id!r} is in use", param="request_id"
            )
        seen.add(request.request_id)
