"""The daemon's log: lines for a terminal or a file with the time, lines for the journal with their priority.

The journal takes a line's priority from `<N>` at its beginning (sd-daemon(3)) and has the time itself. The module does
not decide what is logged.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from kvstore_console.log_format import PrintableFormatter

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_OTHERS = ("asyncio", "grpc")  # what they have to say below a warning is about themselves


class JournalFormatter(PrintableFormatter):
    """A log formatter that puts the record's priority before each line, as the systemd journal expects it."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).split("\n"))


def set_up_logging(level: str, stream: TextIO = sys.stderr) -> None:
    """Write log records from `level` on to `stream`, unless logging was configured before."""
    handler = logging.StreamHandler(stream)
    if is_journal(stream):
        handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in _OTHERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def is_journal(stream: TextIO) -> bool:
    """Return whether `stream` is connected to the systemd journal, by the device and inode in $JOURNAL_STREAM."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
