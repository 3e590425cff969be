import tracemalloc
from typing import Any

import pytest

from gateway.schemas.body import validate
from gateway.schemas.chat import ChatCompletionBody
from services.errors import InvalidArgumentError

MIB = 2**20


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{}] * 1_000_000, "messages[0].role"),
        ([{"role": "user", "content": "x"}] * 1_000_000, "messages"),
        ([{"role": "user", "content": [{}] * 1_000_000}], "messages[0].content[0].type"),
    ],
)
def test_a_bad_list_costs_no_more_than_its_first_fault(
    messages: list[dict[str, Any]], param: str
) -> None:
    """Collecting a fault per item once took gigabytes for a body of megabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgumentError) as caught:
            validate(ChatCompletionBody, {"messages": messages})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == param
    assert peak < 64 * MIB
