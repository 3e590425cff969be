import asyncio

import pytest

from enginecore.outbox import Outbox
from enginecore.request import FinishedRequest, FinishReason
from enginecore.scheduler_output import EngineCoreOutput, Logprobs
from services.errors import UnavailableError
from tests.unit.enginecore.builders import make_request


def logprobs(*tokens: int) -> Logprobs:
    return Logprobs([1] * len(tokens), list(tokens), [-1.0] * len(tokens), [1] * len(tokens))


async def test_merges_what_was_not_taken_c8() -> None:
    """C8"""
    outbox, request = Outbox(), make_request(1)
    outbox.put(7, EngineCoreOutput(request, [1, 2], logprobs(1, 2)))
    outbox.put(8, EngineCoreOutput(request, [9]))
    outbox.put(7, EngineCoreOutput(request, [3], logprobs(3)))
    end = FinishedRequest(request, FinishReason.STOP)
    outbox.put(7, EngineCoreOutput(request, [4], logprobs(4), finished=end))
    taken = await outbox.take()
    assert taken[7].new_token_ids == [1, 2, 3, 4]
    assert taken[7].logprobs == logprobs(1, 2, 3, 4)
    assert taken[7].finished is end
    assert taken[8].new_token_ids == [9]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.take(), 0.01)


async def test_error_comes_after_what_was_put() -> None:
    outbox = Outbox()
    outbox.put(1, EngineCoreOutput(make_request(1), [5]))
    outbox.close(UnavailableError("gone"))
    assert (await outbox.take())[1].new_token_ids == [5]
    with pytest.raises(UnavailableError):
        await outbox.take()


async def test_prompt_logprobs_wait_for_a_token() -> None:
    outbox, request = Outbox(hold_prompt_logprobs=True), make_request(1)
    outbox.put(1, EngineCoreOutput(request, prompt_logprobs=logprobs(1, 2)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.take(), 0.01)
    outbox.put(1, EngineCoreOutput(request, [9], prompt_logprobs=logprobs(3)))
    (output,) = (await outbox.take()).values()
    assert output.prompt_logprobs == logprobs(1, 2, 3)


async def test_client_that_reads_nothing_is_not_heard() -> None:
    outbox, request = Outbox(), make_request(1)
    for handle in range(5000):
        outbox.put(handle, EngineCoreOutput(request, [1]))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.wait_for_room(), 0.01)
    await outbox.take()
    await asyncio.wait_for(outbox.wait_for_room(), 0.01)
