import json
import logging

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
