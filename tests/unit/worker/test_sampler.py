"""The sampler against a naive reference, and its independence of the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.errors import InternalError, InvalidArgumentError
from worker.logits_edits import TokenHistory
from worker.sampler import SamplerInput, SamplerOutput, SamplingMetadata, filtered_probs, sample
from worker.sampling_params import SamplingParams

VOCAB = 50
EOS = (2,)
Rows = list[tuple[SamplingParams, int]]


def metadata_of(params: list[SamplingParams], vocab: int = VOCAB) -> SamplingMetadata:
    return SamplingMetadata.of(params, EOS, vocab)


def history(prompt: list[int], output: list[int]) -> TokenHistory:
    return TokenHistory(np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))


def sample_rows(
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    positions: list[int] | None = None,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    grammar: dict[int, list[int]] | None = None,
) -> SamplerOutput:
    """Samples copies of rows; all have the same history."""
    bits = np.zeros((len(grammar or {}), 8), dtype=np.uint8)
    for i, allowed in enumerate((grammar or {}).values()):
        for token in allowed:
            bits[i, token // 8] |= 1 << token % 8
    rows = SamplerInput(
        metadata=metadata_of(params, logits.shape[1]),
        positions=np.array(positions or [len(output or [])] * len(params), dtype=np.int64),
        histories=dict.fromkeys(range(len(params)), history(prompt or [], output or [])),
        grammar_rows=list(grammar or {}),
        grammar_bits=bits if grammar else None,
    )
    return sample(logits.clone(), rows)


def edited(
    params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> list[float]:
    """Logits of 1, -1, 1, … after a request's edits."""
    logits = torch.tensor([1.0, -1.0] * (VOCAB // 2))
    metadata = metadata_of([params])
    metadata.edits[0].apply(logits, history(prompt or [], output or []))
    return logits.tolist()


def naive_probs(logits: list[float], p: SamplingParams) -> dict[int, float]:
    """The filtered distribution, by sorting a list of pairs."""
    highest = max(logits)
    weights = [np.exp((value - highest) / p.temperature) for value in logits]
    kept = sorted(enumerate(weights), key=lambda pair: (-pair[1], pair[0]))
    kept = [pair for pair in kept if pair[1] > 0 and pair[1] >= p.min_p * kept[0][1]]
    kept = kept[: p.top_k or len(kept)]
    mass, total = 0.0, sum(weight for _, weight in kept)
    nucleus: list[tuple[int, float]] = []
    for token, weight in kept:
        if p.top_p < 1 and nucleus and mass >= p.top_p * total:
            break
        nucleus.append((token, weight))
        mass += weight
    return {token: weight / mass for token, weight in nucleus}


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.1, seed=7)
    result = sample_rows(logits, [greedy] * 4)
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()
    assert result.failed == {}


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=VOCAB),
    SamplingParams(top_k=10 * VOCAB),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=9, top_p=0.8, min_p=0.01, temperature=1.7),
]


def test_filters_equal_the_reference_in_any_company() -> None:
    """D3: k at and over the vocabulary, p of nearly 0 and 1, all filters in one batch."""
    logits = torch.randn(len(FILTERS), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    probs = filtered_probs(logits, metadata_of(FILTERS)).double()
    probs /= probs.sum(-1, keepdim=True)
    for params, row, got in zip(FILTERS, logits.tolist(), probs.tolist(), strict=True):
        expected = naive_probs(row, params)
        assert {t for t, p in enumerate(got) if p} == set(expected), params
        assert [got[t] for t in expected] == pytest.approx(list(expected.values()), rel=1e-4)


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=5), SamplingParams(top_p=0.3), SamplingParams(top_p=0.3001)]
)
def test_ties_are_cut_by_token_id(params: SamplingParams) -> None:
    """D3: exactly k of equal tokens stay, the lowest ids; and the fewest that reach p."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 40:43] = 1.0
    probs = filtered_probs(logits.clone(), metadata_of([params]))[0]
    assert set(probs.nonzero().flatten().tolist()) == set(naive_probs(logits[0].tolist(), params))


def test_top_p_reaches_beyond_the_first_few_tokens() -> None:
    """A flat distribution over a large vocabulary needs more than the first sorted part."""
    vocab = 20_000
    probs = filtered_probs(torch.zeros(1, vocab), metadata_of([SamplingParams(top_p=0.5)], vocab))
    assert int((probs > 0).sum()) == vocab // 2


def test_the_distribution_is_the_one_asked_for() -> None:
    """Chi-square over 20 000 draws: 99.9 % of right samplers pass a bound of 3 sigma and more."""
    draws = 20_000
    params = SamplingParams(temperature=1.3, top_p=0.9, top_k=20)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    expected = naive_probs(logits[0].tolist(), params)
    seeds = [replace(params, seed=i) for i in range(draws)]
    tokens = sample_rows(logits.expand(draws, -1), seeds).token_ids
    counts = np.bincount(tokens, minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(expected)
    chi2 = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    freedom = len(expected) - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


def test_positions_of_one_seed_are_as_good_as_seeds() -> None:
    draws = 20_000
    logits = torch.zeros(1, 4)
    one_seed = [SamplingParams(seed=-5)] * draws
    tokens = sample_rows(logits.expand(draws, -1), one_seed, positions=list(range(draws))).token_ids
    counts = np.bincount(tokens, minlength=4)
    assert np.abs(counts - draws / 4).max() < 4 * np.sqrt(draws * 3 / 16)
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert np.abs(pairs - draws / 16).max() < 5 * np.sqrt(draws / 16)


def test_a_token_depends_on_seed_and_position_alone() -> None:
    """D6, law 2: alone or in any company, at any place in the batch."""
    generator = torch.Generator().manual_seed(3)
    mine = torch.randn(1, VOCAB, generator=generator)
    params = SamplingParams(seed=99, temperature=1.4, top_p=0.95)
    alone = [sample_rows(mine, [params], positions=[i]).token_ids[0] for i in range(30)]
    assert len(set(alone)) > 5
    for i, expected in enumerate(alone):
        others = [FILTERS[(i + j) % len(FILTERS)] for j in range(5)]
        others[1] = SamplingParams(temperature=0.0)
        place = i % 6
        params_list = [*others[:place], params, *others[place:]]
        logits = torch.randn(6, VOCAB, generator=generator)
        logits[place] = mine[0]
        got = sample_rows(logits, params_list, positions=[i] * 6)
        assert got.token_ids[place] == expected


@pytest.mark.parametrize("more", [{}, {"top_p": 0.95}, {"top_k": 200}, {"min_p": 0.001}])
def test_rounding_differences_do_not_change_the_sample(more: dict[str, float]) -> None:
    """Another batch computes the same logits with other rounding errors (law 2, D6).

    Over 20,000 likely tokens, inverting a cumulative distribution differed in a row of a hundred:
    each error shifts every boundary after it.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((400, 20_000), generator=generator)
    errors = 3e-6 * torch.rand(logits.shape, generator=generator)
    errors[:, 10_000:] *= -1
    params = [SamplingParams(temperature=1.0, seed=i, **more) for i in range(400)]  # type: ignore[arg-type]
    before = sample_rows(logits, params).token_ids
    after = sample_rows(logits + errors, params).token_ids
    assert before.tolist() == after.tolist()


def test_another_seed_gives_another_sample() -> None:
    logits = torch.zeros(1, VOCAB)
    runs = [
        [
            int(sample_rows(logits, [SamplingParams(seed=s)], positions=[i]).token_ids[0])
            for i in range(10)
        ]
        for s in (1, 2, -1, 2**63 - 1)
    ]
    assert len({tuple(run) for run in runs}) == 4


def test_presence_and_frequency_count_output_tokens_only() -> None:
    """D2."""
    logits = edited(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=[8], output=[4, 6, 4]
    )
    assert (logits[4], logits[6], logits[8]) == (1 - 0.5 - 0.5, 1 - 0.5 - 0.25, 1.0)


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    """D2: of prompt and output tokens."""
    logits = edited(SamplingParams(repetition_penalty=2.0), prompt=[8, 9], output=[4, 5])
    assert [logits[t] for t in (8, 9, 4, 5, 10, 11)] == [0.5, -2.0, 0.5, -2.0, 1.0, -1.0]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40, 1e-36, 1e-3, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
def test_an_extreme_repetition_penalty_still_leaves_a_choice(
    penalty: float, temperature: float
) -> None:
    """D2: a tiny one favours what was seen, and must not overflow to where nothing is drawn."""
    params = SamplingParams(
        repetition_penalty=penalty, presence_penalty=-2.0, temperature=temperature
    )
    logits = torch.tensor([[1.0, -1.0] * (VOCAB // 2)])
    out = sample_rows(logits, [params], prompt=[8, 9], output=[4, 5])
    assert out.failed == {}
    assert penalty > 1 or int(out.token_ids[0]) in (4, 8)


def test_allowed_token_ids_exclude_all_others() -> None:
    """D2."""
    logits = edited(SamplingParams(allowed_token_ids=(3, 7)))
    assert {t for t, value in enumerate(logits) if value != float("-inf")} == {3, 7}
    assert logits[3] == -1.0


def test_bad_words_forbid_the_last_token_after_its_prefix_only() -> None:
    """D2."""
    params = SamplingParams(bad_words=((5, 6, 8), (9,), (1, 2)))

    def banned(output: list[int]) -> set[int]:
        values = edited(params, output=output)
        return {t for t, value in enumerate(values) if value == float("-inf")}

    assert banned([5, 6]) == {8, 9}
    assert banned([6]) == {9}
    assert banned([5, 6, 1]) == {9, 2}


def test_min_tokens_masks_stops_until_then() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(7,))
    assert [edited(params, output=[1])[t] for t in (2, 7)] == [float("-inf")] * 2
    assert [edited(params, output=[1, 1])[t] for t in (2, 7)] == [1.0, -1.0]
    ignoring = edited(replace(params, ignore_eos=True), output=[1])
    assert [ignoring[t] for t in (2, 7)] == [1.0, float("-inf")]


def test_logit_bias_is_added() -> None:
    logits = edited(SamplingParams(logit_bias={4: 2.5, 5: -3.0}))
    assert (logits[4], logits[5], logits[6]) == (3.5, -4.0, 1.0)


def test_a_grammar_row_still_gets_its_top_k() -> None:
    """D3: the mask comes first, and touches its own row only."""
    logits = torch.arange(VOCAB, dtype=torch.float32).expand(3, -1)
    params = [SamplingParams(top_k=1), SamplingParams(temperature=0.0), SamplingParams(top_k=1)]
    result = sample_rows(logits, params, grammar={0: [3, 30], 1: [4]})
    assert result.token_ids.tolist() == [30, 4, VOCAB - 1]


def test_rows_without_a_possible_token_fail_alone() -> None:
    """D3: minus infinity everywhere; law 3: the neighbours are unharmed."""
    logits = torch.zeros(4, VOCAB)
    logits[:, 9] = 5.0
    logits[2] = float("nan")
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)]
    result = sample_rows(logits, [*params, params[0]], grammar={1: []})
    assert {row: type(error) for row, error in result.failed.items()} == {
        1: InvalidArgumentError,
        2: InternalError,
    }
    assert result.token_ids[[0, 3]].tolist() == [9, 9]


def test_a_tiny_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[50.0, 49.0, -1000.0] + [0.0] * (VOCAB - 3)])
    result = sample_rows(logits, [SamplingParams(temperature=2e-5)])
    assert (result.token_ids.tolist(), result.failed) == ([0], {})
