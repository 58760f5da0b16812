"""Logs: one line of JSON for each request and each event, without what was asked and answered unless wanted."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
import uuid
from typing import Any, TextIO

__all__ = ["LEVELS", "LOGGER", "JsonLines", "configure_logs", "request_id_of"]

LOGGER = "kvpager.server"
LEVELS = {LOGGER: logging.INFO, "kvpager.stores": logging.WARNING, "uvicorn": logging.WARNING}
_REQUEST_ID = re.compile(r"[\w.:@+/=-]{1,128}", re.ASCII)


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, event, and the fields given as ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; ASCII, so that nothing that a client sent can break it or begin another."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(fields, default=str)


def configure_logs(stream: TextIO | None = None) -> None:
    """Send what the server, its store and uvicorn log to `stream` (standard output), one line of JSON each."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stdout)
    handler.setFormatter(JsonLines())
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def request_id_of(header: str | None) -> str:
    """The client's X-Request-Id where it is one that logs and headers can carry, else a new one."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else f"req-{uuid.uuid4().hex}"
