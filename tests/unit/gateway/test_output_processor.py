from hypothesis import given
from hypothesis import strategies as st

from gateway.output_processor import ChoiceProcessor, OutputOptions, TextDelta
from gateway.request import EngineDelta, Finished, FinishReason
from gateway.tokenizer import Tokenizer
from tests.fakes.tokenizer import EOS_ID, byte_backend, byte_ids

BYTES = Tokenizer(byte_backend())
STOPPED = Finished(FinishReason.STOP)
LENGTH = Finished(FinishReason.LENGTH)


def _processor(options: OutputOptions | None = None) -> ChoiceProcessor:
    return ChoiceProcessor(0, BYTES.detokenizer(), options or OutputOptions())


def _run(processor: ChoiceProcessor, deltas: list[EngineDelta]) -> list[TextDelta]:
    return [shown for delta in deltas if (shown := processor.process(delta))]


def _text(shown: list[TextDelta]) -> str:
    return "".join(delta.text for delta in shown)


@given(
    st.text("ab€\n", max_size=20),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=2),
    st.integers(0, 5),
    st.integers(1, 6),
    st.booleans(),
)
def test_grouping_of_tokens_does_not_matter(
    text: str, stop: list[str], min_tokens: int, size: int, include: bool
) -> None:
    """F2, F6: a slow reader, whose deltas are merged, gets what a fast one gets."""
    options = OutputOptions(stop, include, min_tokens)
    ids = byte_ids(text)

    def outcome(group: int) -> tuple[str, int, object, object]:
        groups = [ids[i : i + group] for i in range(0, len(ids), group)] or [[]]
        deltas = [EngineDelta(0, list(part)) for part in groups]
        deltas[-1].finished = LENGTH
        processor = _processor(options)
        shown = _run(processor, deltas)
        assert sum(len(delta.token_ids) for delta in shown) == processor.num_tokens
        reasons = [delta.finish_reason for delta in shown if delta.finish_reason]
        assert len(reasons) == 1, "exactly one finish reason"
        assert shown[-1].finish_reason is not None
        return _text(shown), processor.num_tokens, reasons[0], shown[-1].stop_reason

    assert outcome(1) == outcome(size)


def test_stop_string_cuts_and_drops_what_comes_late_f6() -> None:
    """F6: text before it, its reason, and nothing of tokens that were already under way."""
    processor = _processor(OutputOptions(stop=["END"]))
    shown = _run(processor, [EngineDelta(0, byte_ids("oneE")), EngineDelta(0, byte_ids("NDtwo"))])
    assert [delta.text for delta in shown] == ["one", ""]
    assert shown[-1].finish_reason is FinishReason.STOP
    assert shown[-1].stop_reason == "END"
    assert processor.num_tokens == len("oneEND")
    assert processor.process(EngineDelta(0, byte_ids("late"), LENGTH)) is None


def test_stop_string_is_kept_when_asked_f6() -> None:
    processor = _processor(OutputOptions(stop=["END"], include_stop_str_in_output=True))
    assert _text(_run(processor, [EngineDelta(0, byte_ids("oneENDtwo"))])) == "oneEND"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    processor = _processor(OutputOptions(stop=["a"], min_tokens=2))
    shown = _run(processor, [EngineDelta(0, byte_ids("aabab"))])
    assert _text(shown) == "aab"


def test_withheld_text_comes_out_at_the_end() -> None:
    processor = _processor(OutputOptions(stop=["END"]))
    shown = _run(processor, [EngineDelta(0, byte_ids("oneEN")), EngineDelta(0, [], LENGTH)])
    assert [delta.text for delta in shown] == ["one", "EN"]
    assert shown[-1].finish_reason is FinishReason.LENGTH


def test_half_a_character_at_the_end_is_replaced() -> None:
    shown = _run(_processor(), [EngineDelta(0, byte_ids("a€")[:-1], LENGTH)])
    assert _text(shown) == "a\ufffd"


def test_end_of_sequence_token_counts_but_is_not_shown() -> None:
    processor = _processor()
    shown = _run(processor, [EngineDelta(0, [*byte_ids("hi"), EOS_ID], STOPPED)])
    assert _text(shown) == "hi"
    assert shown[-1].token_ids == [*byte_ids("hi"), EOS_ID]
    assert shown[-1].stop_reason is None


def test_stop_token_is_named_and_hidden_unless_asked_for() -> None:
    """F6, A6: `stop_reason` is the token; it stays in the tokens, not in the text."""
    stop_id = byte_ids("!")[0]
    finished = Finished(FinishReason.STOP, stop_token_id=stop_id)
    for include, text in ((False, "hi"), (True, "hi!")):
        processor = _processor(OutputOptions(include_stop_str_in_output=include))
        shown = _run(processor, [EngineDelta(0, byte_ids("hi!"), finished)])
        assert (_text(shown), shown[-1].stop_reason) == (text, stop_id)
        assert processor.num_tokens == 3
