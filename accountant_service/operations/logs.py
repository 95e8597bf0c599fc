"""The log: one JSON object per line, without API keys, bodies or other values of requests."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Final

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

# written beside the event, if a record has them; other attributes are dropped
_FIELDS: Final = ("method", "route", "status", "milliseconds", "code")


def configure(level: str) -> None:
    """Write all log records of this process to standard error as JSON.

    Args:
        level: the lowest level that is written, such as `info`.
    """
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(_FIELDS),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _drop_exception_message,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=processors,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def _drop_exception_message(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace an exception in a log event by its type and stack, without its message."""
    info = event.pop("exc_info", None)
    if isinstance(info, tuple) and info[1] is not None:
        frames = traceback.extract_tb(info[2])
        event["exception"] = info[0].__name__
        event["frames"] = [f"{each.filename}:{each.lineno} {each.name}" for each in frames]
    return event
