"""What chat completions and completions have in common."""

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.output_processor import OutputOptions
from gateway.request import SamplingParams
from gateway.schemas.body import Schema, fault_of

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_N: Final = 128
MAX_BIASES: Final = 1024
REQUEST_ID_PATTERN: Final = r"^[\x21-\x7e]{1,128}$"
_INT64: Final = 2**63
_UINT32: Final = 2**32

TokenId = Annotated[int, Field(ge=0, lt=_UINT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _as_list(value: Any) -> Any:  # noqa: ANN401 - a validator sees anything
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list),
]


class StreamOptions(Schema):
    """How a stream reports its token counts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Schema):
    """The parameters of either endpoint."""

    NEUTRAL: ClassVar[dict[str, list[Any]]] = {
        "bad_words": [[]],
        "best_of": [1],
        "echo": [False],
        "guided_choice": [],
        "guided_grammar": [],
        "guided_json": [],
        "guided_regex": [],
        "kv_transfer_params": [],
        "length_penalty": [1, 1.0],
        "logprobs": [False],
        "prompt_logprobs": [],
        "response_format": [{"type": "text"}],
        "return_token_ids": [False],
        "return_tokens_as_token_ids": [False],
        "structured_outputs": [],
        "suffix": [""],
        "truncate_prompt_tokens": [],
        "use_beam_search": [False],
    }
    """Known parameters that are not built, and the values of each that ask for nothing."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=_UINT32)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_UINT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_UINT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^\d{1,10}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fault_of("stream_options", "stream_options is only allowed when stream is true")
        if self.min_tokens and self.token_limit and self.min_tokens > self.token_limit:
            raise fault_of("min_tokens", "min_tokens must not be over max_tokens")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, under whichever name it came."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether each chunk has the running counts."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    def sampling(self) -> SamplingParams:
        """How to choose tokens."""
        return SamplingParams(
            max_tokens=self.token_limit,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_p=self.top_p,
            # vLLM's way to turn it off; the contract's is 0
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(i): bias for i, bias in (self.logit_bias or {}).items()},
            allowed_token_ids=self.allowed_token_ids or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
        )

    def output(self) -> OutputOptions:
        """How to cut the text."""
        return OutputOptions(
            stop=self.stop or (),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            min_tokens=self.min_tokens or 0,
        )
