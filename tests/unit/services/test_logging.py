import json
import logging
import sys

import pytest

from services.logging import JsonFormatter, TextFormatter


def record(**extra: object) -> logging.LogRecord:
    logger = logging.getLogger("some.module")
    return logger.makeRecord(
        logger.name, logging.INFO, __file__, 1, "it %s", ("happened",), None, extra=extra
    )


def test_json_lines_carry_the_extras() -> None:
    line = json.loads(JsonFormatter("worker").format(record(request_id="r-1", tokens=3)))
    assert line["message"] == "it happened"
    assert (line["service"], line["level"], line["logger"]) == ("worker", "INFO", "some.module")
    assert (line["request_id"], line["tokens"]) == ("r-1", 3)


def test_text_lines_carry_the_extras_and_drop_none() -> None:
    line = TextFormatter("gateway").format(record(request_id="r-1", trace_id=None))
    assert line.endswith("INFO gateway it happened request_id=r-1")


def test_a_newline_in_a_value_stays_one_json_line() -> None:
    assert "\n" not in JsonFormatter("worker").format(record(request_id="a\nb"))


@pytest.mark.parametrize("char", ["\n", "\r", "\x0b", "\x1b", "\x85", "\u2028", "\x00"])
def test_a_client_cannot_forge_a_text_line(char: str) -> None:
    """Neither in a field nor in the message: control characters are written as escapes."""
    line = TextFormatter("gateway").format(record(request_id=f"a{char}2026 INFO b", why=f"é{char}"))
    assert char not in line
    assert len(line.splitlines()) == 1
    assert "é" in line


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        faulty = logging.makeLogRecord({"msg": "it failed", "exc_info": sys.exc_info()})
    assert len(TextFormatter("gateway").format(faulty).splitlines()) > 3
