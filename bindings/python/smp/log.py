"""The logger `smp`: INFO and above are visible on stderr, unless the user has configured logging."""

import logging
import sys

logger = logging.getLogger("smp")


class _Formatter(logging.Formatter):
    """The bare message for INFO, since reports have several lines; other levels say who speaks."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"smp {record.levelname}: {text}"


class _DefaultHandler(logging.Handler):
    """Writes to the current `sys.stderr`, and stays silent once the root logger has handlers of its own.

    Looking at each record, and not once at import, avoids double lines for scripts that call
    `logging.basicConfig` after the import.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers and logger.propagate:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def configure() -> None:
    """Makes INFO visible on stderr. Does nothing for a logger that already has a level or handlers.

    Idempotent; the package calls it once, at import.
    """
    if logger.handlers or logger.level != logging.NOTSET:
        return
    logger.setLevel(logging.INFO)
    handler = _DefaultHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
