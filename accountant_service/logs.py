"""The log: one JSON object a line, which never holds a key, a body or any other value sent."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Final

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

# what a request's line says beside its event; other attributes of records are not written
_FIELDS: Final = ("method", "route", "status", "milliseconds", "code")


def configure(level: str) -> None:
    """Send every log record of this process to standard error as JSON.

    Args:
        level: the least level that is written, such as `info`.
    """
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(_FIELDS),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_values,
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


def _without_values(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """An exception as its type and place: its message may quote what was sent."""
    info = event.pop("exc_info", None)
    if isinstance(info, tuple) and info[1] is not None:
        frames = traceback.extract_tb(info[2])
        event["exception"] = info[0].__name__
        event["frames"] = [f"{each.filename}:{each.lineno} {each.name}" for each in frames]
    return event
