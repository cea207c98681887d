"""Log lines of an engine on their way to Dagster, without making the engine wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue


class _HandOn(logging.Handler):
    """Passes lines on to another logger."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        self._log.log(record.levelno, record.getMessage())


@contextmanager
def logging_aside(log: logging.Logger, name: str) -> Iterator[logging.Logger]:
    """A logger whose lines are passed on by a thread of its own; leaving waits for the last of them.

    Dagster writes each line to its storage before it returns, which takes about as long as half a batch.
    """
    lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger = logging.Logger(name)
    logger.addHandler(QueueHandler(lines))
    listener = QueueListener(lines, _HandOn(log))
    listener.start()
    try:
        yield logger
    finally:
        listener.stop()
