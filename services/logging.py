"""Structured logs: one line per event, as text for people or JSON for machines.

Fields beyond the message are passed as `extra={...}`. Prompts, outputs and keys are never passed.
"""

import json
import logging
import re
import sys
import time
from typing import Any

# attributes that every LogRecord has: what is beyond them came as `extra`
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# what would begin a line of its own, or steer a terminal
_CONTROLS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")


def _one_line(text: str) -> str:
    """The text with control characters as escapes: values may come from clients."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and v is not None}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123 INFO gateway message key=value …`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback when there is one."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname} {self._service}"
        fields = "".join(f" {k}={v}" for k, v in _extras(record).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{head} {_one_line(record.getMessage() + fields)}{trace}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time_unix_ns": time.time_ns(),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure_logging(level: str, log_format: str, *, service: str) -> None:
    """Sends the root logger's lines to stderr; called once, in `__main__`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # these speak of every request or connection at INFO
    for noisy in ("httpx", "httpcore", "uvicorn.access", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
