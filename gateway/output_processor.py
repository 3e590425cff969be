"""What the engine says about one choice, turned into what its client is shown.

Tokens are taken one by one where a stop string may end the text, so that text, token count and
finish reason do not depend on how the engine grouped the tokens:

    token -> detokenizer -> stop strings -> text to show
                                 `-> hit: the choice ends here, and the engine must abort it
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.request import EngineDelta, Finished, FinishReason
from gateway.stop_strings import StopStringMatcher


@dataclass(slots=True, frozen=True)
class OutputOptions:
    """How a choice's text is cut.

    Attributes:
        stop: the text ends before any of these; none is empty.
        include_stop_str_in_output: keep what stopped it (string or token) in the text.
        min_tokens: stop strings count only in text after this many tokens.
    """

    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0


@dataclass(slots=True)
class TextDelta:
    """What a choice's client is shown next.

    Attributes:
        index: the choice.
        text: since the previous delta; whole characters only.
        token_ids: since then.
        finish_reason: set in the last delta.
        stop_reason: the stop string or stop token that ended the choice, if one did.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChoiceProcessor:
    """The text of one choice.

    Args:
        index: the choice.
        detokenizer: of this choice alone.
        options: how the text is cut.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, options: OutputOptions) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopStringMatcher(options.stop, include=options.include_stop_str_in_output)

    def process(self, delta: EngineDelta) -> TextDelta | None:
        """Takes news from the engine; None when there is nothing to show.

        A delta with a finish reason is the choice's last; news after it is dropped. It was ended by
        a stop string, which the engine does not know of, exactly when `delta.finished` is not set.
        """
        if self.finish_reason is not None:
            return None
        pieces: list[str] = []
        hit, num_taken = self._take_tokens(delta, pieces)
        self.num_tokens += num_taken
        shown = TextDelta(self.index, "", delta.token_ids[:num_taken])
        if hit is not None:
            shown.finish_reason, shown.stop_reason = FinishReason.STOP, hit
        elif delta.finished is not None:
            self._finish(delta.finished, shown, pieces)
        self.finish_reason = shown.finish_reason
        shown.text = "".join(pieces)
        return shown if shown.text or shown.token_ids or shown.finish_reason else None

    def _take_tokens(self, delta: EngineDelta, pieces: list[str]) -> tuple[str | None, int]:
        """Detokenizes; returns the stop string that was hit and the tokens taken until then."""
        visible = len(delta.token_ids) - self._num_hidden(delta)
        if not self._options.stop:
            pieces.append(self._detokenizer.push(delta.token_ids[:visible]))
            return None, len(delta.token_ids)
        for i, token_id in enumerate(delta.token_ids[:visible]):
            text = self._detokenizer.push((token_id,))
            if self.num_tokens + i + 1 <= self._options.min_tokens:
                pieces.append(text)
                continue
            scan = self._matcher.push(text)
            pieces.append(scan.text)
            if scan.hit is not None:
                return scan.hit, i + 1
        return None, len(delta.token_ids)

    def _num_hidden(self, delta: EngineDelta) -> int:
        """1 if the last token is what stopped the sequence and is not shown, else 0."""
        if delta.finished is None or self._options.include_stop_str_in_output:
            return 0
        return int(delta.finished.reason is FinishReason.STOP and bool(delta.token_ids))

    def _finish(self, finished: Finished, shown: TextDelta, pieces: list[str]) -> None:
        scan = self._matcher.push(self._detokenizer.flush())
        pieces.append(scan.text)
        shown.finish_reason, shown.stop_reason = finished.reason, finished.stop_token_id
        if scan.hit is not None:
            shown.finish_reason, shown.stop_reason = FinishReason.STOP, scan.hit
        else:
            pieces.append(self._matcher.flush())
