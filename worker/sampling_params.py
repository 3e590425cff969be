"""How the output tokens of one request are chosen."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.errors import InvalidArgumentError

GREEDY_TEMPERATURE = 1e-5
"""Below this, a softmax in float32 is one-hot anyhow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The worker's part of common.v1.SamplingParams; the defaults are those of unset fields."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    """None: all tokens."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives to report beside the sampled token; None: report nothing."""
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Earlier tokens change the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def edits_logits(self) -> bool:
        """Any logit changes before temperature."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.min_tokens
        )

    def check_token_ids(self, vocab_size: int) -> None:
        """Errors: InvalidArgumentError naming the field with a token beyond the vocabulary."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
            "bad_words": (token for word in self.bad_words for token in word),
        }
        for name, tokens in named.items():
            if any(not 0 <= token < vocab_size for token in tokens):
                raise InvalidArgumentError(
                    f"{name} has a token outside the vocabulary of {vocab_size}", param=name
                )
