"""Changes to the logits of single requests.

In this order: allowed tokens, bad words, minimum length, bias, penalties; then the grammar's mask.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.sampling_params import SamplingParams

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens that a request has so far."""

    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]


class LogitsEdits:
    """The edits of one request.

    Args:
        params: of the request; its token ids are inside the vocabulary.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
        self._params = params
        ends = params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)
        self._ends = torch.tensor(ends, dtype=torch.int64)
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._allowed = torch.tensor(params.allowed_token_ids, dtype=torch.int64)

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Edits `[vocab]` float32 in place."""
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill_(_NEVER)
            logits[self._allowed] = kept
        for word in self._params.bad_words:
            _forbid_word(logits, word, history.output)
        if len(history.output) < self._params.min_tokens:
            logits[self._ends] = _NEVER
        if len(self._biased):
            logits[self._biased] += self._bias
        if self._params.has_penalties:
            _penalise(logits, self._params, history)


def _forbid_word(logits: Tensor, word: tuple[int, ...], output: npt.NDArray[np.int32]) -> None:
    """Forbids a word's last token when the output just ended with the rest of it."""
    if not word:
        return
    prefix = len(word) - 1
    if prefix == 0 or (len(output) >= prefix and tuple(output[-prefix:]) == word[:-1]):
        logits[word[-1]] = _NEVER


def _penalise(logits: Tensor, params: SamplingParams, history: TokenHistory) -> None:
    """Repetition penalty (Keskar et al. 2019) on all tokens, then OpenAI's two on the output's."""
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate((history.prompt, history.output)))).long()
        chosen = logits[seen]
        factor = params.repetition_penalty
        # a tiny factor must not make infinities, between which nothing can be chosen
        highest = torch.finfo(torch.float32).max
        logits[seen] = torch.where(chosen > 0, chosen / factor, chosen * factor).clamp_(max=highest)
    tokens, counts = np.unique(history.output, return_counts=True)
    index = torch.from_numpy(tokens).long()
    frequency = torch.from_numpy(counts).float() * params.frequency_penalty
    logits[index] -= frequency + params.presence_penalty


def forbid_by_grammar(logits: Tensor, rows: list[int], bits: npt.NDArray[np.uint8]) -> None:
    """Applies token bitmasks in place.

    Args:
        logits: `[num_rows, vocab]` float32.
        rows: the rows that have a mask.
        bits: `[len(rows), bytes]`; bit `t % 8` of byte `t // 8` allows token `t`.
    """
    allowed = np.unpackbits(bits, axis=1, count=logits.shape[1], bitorder="little")
    index = torch.tensor(rows, dtype=torch.int64)
    forbidden = torch.from_numpy(allowed == 0)
    logits[index] = logits[index].masked_fill_(forbidden, _NEVER)
