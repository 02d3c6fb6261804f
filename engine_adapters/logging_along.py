"""What kvfs logs inside an engine goes where the engine's own log goes.

Engines configure a logger of their own name and leave the root alone, so what another library logs is lost below WARNING,
and above it comes without time and process on stderr, which not everybody keeps. An engine may configure its logger after
kvfs was imported, and again (vLLM does so in each process), so records are passed on as they come: nothing is copied.
"""

from __future__ import annotations

import logging

OURS = "kvfs"


class PassingOn(logging.Handler):
    """Gives each record to a logger, as if it had been logged there; its level and handlers decide."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.engine = logging.getLogger(name)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on."""
        if self.engine.isEnabledFor(record.levelno):
            self.engine.handle(record)


def log_with(name: str) -> None:
    """Let kvfs log where the logger of this name does, unless somebody has given kvfs handlers of its own.

    A configuration of the engine's that disables loggers which it does not name (the default of `logging.config`) does
    not mean ours.
    """
    ours = logging.getLogger(OURS)
    if not ours.handlers:
        ours.addHandler(PassingOn(name))
        ours.propagate = False
    if not ours.level:
        ours.setLevel(logging.getLogger(name).getEffectiveLevel())
    for known, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and (known == OURS or known.startswith(f"{OURS}.")):
            logger.disabled = False
