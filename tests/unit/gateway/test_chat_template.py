import itertools

import pytest

from gateway.chat_template import ChatTemplate
from services.errors import FailedPreconditionError, InvalidArgumentError

USER = [{"role": "user", "content": "hi"}]


def _render(source: str, /, **extra: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, extra=extra)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("{% if true %}\nx\n{% endif %}\n", "x\n"),
        ("  {% if true %}x{% endif %}", "x"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0]['role'] }}{% endgeneration %}", "user"),
        ("{{ add_generation_prompt }}{{ tools is none }}", "TrueTrue"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ thinking }}", "yes"),
    ],
)
def test_conventions(source: str, text: str) -> None:
    assert _render(source, thinking="yes") == text


def test_template_may_refuse() -> None:
    with pytest.raises(InvalidArgumentError, match="only one role") as caught:
        _render("{{ raise_exception('only one role') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nope.deeper }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_faults_are_the_requests_own(source: str) -> None:
    with pytest.raises(InvalidArgumentError):
        _render(source)


@pytest.mark.parametrize("name", ["self", "context", "args", "kwargs"])
def test_a_variable_may_have_any_name(name: str) -> None:
    assert _render("{{ messages[0].content }}", **{name: 1}) == "hi"


def test_output_is_bounded() -> None:
    row = "{{ 'x' * 1000 }}"
    loop = "{% for i in range(1000) %}" * 2 + row + "{% endfor %}" * 2
    with pytest.raises(InvalidArgumentError, match="too long"):
        _render(loop)


def test_time_is_bounded() -> None:
    ticks = itertools.count()
    template = ChatTemplate(
        "{% for i in range(100) %}{{ i }}{% endfor %}", {}, clock=lambda: float(next(ticks))
    )
    with pytest.raises(InvalidArgumentError, match="takes too long"):
        template.render(USER)


def test_bad_template_names_its_line() -> None:
    with pytest.raises(FailedPreconditionError, match="line 2"):
        ChatTemplate("\n{% if %}", {})
