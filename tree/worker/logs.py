"""Log lines of a worker: to stderr, one per transition of its life, JSON for programs or key=value for people."""

import logging
import sys

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logs(log_format: str, log_level: str) -> None:
    """log_format: "auto" looks whether stderr is a terminal; "console" or "json". Raises ValueError."""
    if log_format not in ("auto", "console", "json") or log_level not in _LEVELS:
        raise ValueError(f"unknown log format {log_format!r} or level {log_level!r}")
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if is_console else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log_level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
