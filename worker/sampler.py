"""Chooses the next token of each request.

Edits of single requests and grammar masks come first (`logits_edits`). Greedy rows then take the
most likely token. For the others: divide by the temperature, softmax, min_p, top_k, top_p (each
over what the one before left), and let the tokens left race: each arrives after an exponentially
distributed time over its probability, and the first one is drawn with just that probability (the
Gumbel-max trick, without a logarithm). Times are the noise of (seed, position, token), so nothing a
row draws depends on the other rows; and the rounding differences that another batch brings matter
only if the first two arrive within a rounding error of each other. Ties at the edge of top_k and
top_p are cut by token id.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.errors import InternalError, InvalidArgumentError, ServiceError
from worker.logits_edits import LogitsEdits, TokenHistory, forbid_by_grammar
from worker.sampling_noise import exponentials, keys
from worker.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]

# top_p needs the probabilities in order, but rarely more than the first few: these many are tried
_TOP_P_WIDTHS = (512, 8192)


@dataclass(slots=True)
class SamplingMetadata:
    """What does not change while the same rows are sampled: `[n]` is the number of rows."""

    edits: dict[int, LogitsEdits]
    """Rows that have any."""
    random_rows: IntArray
    """`[r]`: rows that are not greedy; the columns below are for these."""
    seeds: IntArray
    temperature: Tensor
    """`[r, 1]` float32."""
    min_p: Tensor
    """`[r, 1]` float32."""
    top_k: Tensor
    """`[r]` int64; the vocabulary's size where it is off."""
    top_p: Tensor
    """`[r]` float64."""

    @classmethod
    def of(
        cls, params: list[SamplingParams], eos_token_ids: tuple[int, ...], vocab_size: int
    ) -> "SamplingMetadata":
        """Builds the columns from each row's parameters."""
        rows = [row for row, p in enumerate(params) if not p.is_greedy]
        drawn = [params[row] for row in rows]
        return cls(
            edits={
                i: LogitsEdits(p, eos_token_ids) for i, p in enumerate(params) if p.edits_logits
            },
            random_rows=np.array(rows, dtype=np.int64),
            seeds=np.array([p.seed for p in drawn], dtype=np.int64),
            temperature=torch.tensor([[p.temperature] for p in drawn], dtype=torch.float32),
            min_p=torch.tensor([[p.min_p] for p in drawn], dtype=torch.float32),
            top_k=torch.tensor(
                [min(p.top_k or vocab_size, vocab_size) for p in drawn], dtype=torch.int64
            ),
            top_p=torch.tensor([p.top_p for p in drawn], dtype=torch.float64),
        )


@dataclass(slots=True)
class SamplerInput:
    """One step's rows."""

    metadata: SamplingMetadata
    positions: IntArray
    """`[n]`: output tokens that each row has already."""
    histories: dict[int, TokenHistory]
    """Of the rows that have edits."""
    grammar_rows: list[int] = field(default_factory=list)
    grammar_bits: npt.NDArray[np.uint8] | None = None


@dataclass(slots=True)
class SamplerOutput:
    """What was chosen."""

    token_ids: IntArray
    """`[n]`; meaningless for failed rows."""
    failed: dict[int, ServiceError]
    """Rows for which no token could be chosen."""


def sample(logits: Tensor, rows: SamplerInput) -> SamplerOutput:
    """Chooses a token per row.

    Args:
        logits: `[n, vocab]` float32; edited in place.
        rows: how, and with which history.
    """
    failed: dict[int, ServiceError] = {}
    for row, edits in rows.metadata.edits.items():
        try:
            edits.apply(logits[row], rows.histories[row])
        except (IndexError, ValueError, RuntimeError) as error:
            failed[row] = InternalError(f"sampling failed ({type(error).__name__})")
    if rows.grammar_bits is not None:
        forbid_by_grammar(logits, rows.grammar_rows, rows.grammar_bits)
    highest, best = logits.max(dim=-1)
    failed |= _unusable(highest)
    token_ids: IntArray = best.numpy()
    drawn_rows = rows.metadata.random_rows
    if len(drawn_rows):
        chosen = logits if len(drawn_rows) == len(logits) else logits[torch.from_numpy(drawn_rows)]
        row_keys = keys(rows.metadata.seeds, rows.positions[drawn_rows])
        token_ids[drawn_rows] = _race(filtered_probs(chosen, rows.metadata), row_keys)
    return SamplerOutput(token_ids, failed)


def _unusable(highest: Tensor) -> dict[int, ServiceError]:
    """Rows whose highest logit is not a number, or minus infinity."""
    if bool(highest.isfinite().all()):
        return {}
    failed: dict[int, ServiceError] = {}
    for row, value in enumerate(highest.tolist()):
        if value == float("-inf"):
            failed[row] = InvalidArgumentError("the request's constraints exclude every token")
        elif not np.isfinite(value):
            failed[row] = InternalError("the model gave no finite scores")
    return failed


def _race(probs: Tensor, row_keys: npt.NDArray[np.uint64]) -> list[int]:
    """Draws a token of each row of `[r, vocab]` by its key; token 0 where the row is unusable.

    Row by row, over the tokens left only: a row's arrays stay in the CPU's cache.
    """
    winners = []
    for row, key in zip(probs, row_keys, strict=True):
        left = row.nonzero().squeeze(-1)
        arrivals = exponentials(key, left.numpy()).div_(row[left])
        winners.append(int(left[arrivals.argmin()]) if len(left) else 0)
    return winners


def filtered_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """The distribution that is drawn from, up to a factor per row: `[r, vocab]` float32."""
    # the highest is taken off first, so that a tiny temperature cannot overflow
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(metadata.temperature)
    probs = scaled.softmax(-1)
    if bool((metadata.min_p > 0).any()):
        probs.masked_fill_(probs < metadata.min_p * probs.amax(-1, keepdim=True), 0.0)
    limited = (metadata.top_k < logits.shape[-1]).nonzero().squeeze(-1)
    if len(limited):
        probs[limited] = _keep_top_k(probs[limited], metadata.top_k[limited])
    limited = (metadata.top_p < 1.0).nonzero().squeeze(-1)
    if len(limited):
        probs[limited] = _keep_top_p(probs[limited], metadata.top_p[limited])
    return probs


def _keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    ordered = probs.topk(int(top_k.max()), dim=-1).values
    return _keep_largest(probs, ordered, top_k)


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest most likely tokens that reach the share `top_p` of what is left."""
    wanted = probs.sum(-1, dtype=torch.float64) * top_p
    rows = torch.arange(len(probs))
    for width in (*_TOP_P_WIDTHS, probs.shape[-1]):
        chosen = probs[rows]
        ordered = chosen.topk(min(width, probs.shape[-1]), dim=-1).values
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        counts = (before < wanted[rows, None]).sum(-1).clamp_(min=1)
        # a row whose every candidate is needed may need more of them
        ends = (counts < width) | (width == probs.shape[-1])
        probs[rows[ends]] = _keep_largest(chosen[ends], ordered[ends], counts[ends])
        rows = rows[~ends]
        if not len(rows):
            break
    return probs


def _keep_largest(probs: Tensor, ordered: Tensor, counts: Tensor) -> Tensor:
    """Zeroes all but the `counts` largest of each row; of equal ones the lowest ids stay.

    Args:
        probs: `[rows, vocab]`; edited in place.
        ordered: the largest of each row in descending order, at least `counts` of them.
        counts: `[rows]` int64, at least 1.
    """
    least = ordered.gather(-1, counts[:, None] - 1)
    larger = probs > least
    equal = probs == least
    room = counts - larger.sum(-1)
    crowded = (equal.sum(-1) > room).nonzero().squeeze(-1)
    if len(crowded):
        ties = equal[crowded]
        equal[crowded] = ties & (ties.cumsum(-1) <= room[crowded, None])
    return probs.masked_fill_(~(larger | equal), 0.0)
