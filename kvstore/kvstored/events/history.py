"""State that outlives the process that publishes events: an epoch that only grows, and the topics that were published.

The numbers of a process's batches begin at its epoch times 2**31. So they are larger than every number of a former
process, also after a step of the wall clock, and if that process alone was restarted. Topics of which this daemon has
no block are published too, as cleared: subscribers may still have blocks of them.

A file of the state directory has both. If it cannot be written, numbers grow as long as the daemon lives; if it is
lost, the wall clock alone orders this daemon's numbers after earlier ones.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvstore_tiers.replaced_file import replace_file

log = logging.getLogger(__name__)
FILE = "events.json"
EPOCH_BITS = 31  # of a number: three years of a hundred batches a second
MAX_EPOCH = (1 << 32) - 1  # numbers stay below 2**63
MAX_TOPICS = 256  # those before are forgotten: the oldest first
_MAX_FILE_BYTES = 1 << 20


class PublishedBefore:
    """A record, kept in a file of the state directory `directory`, of the batch numbers and topics that earlier event
    publishers have used. With `directory` None no file is kept. `now_s` returns the wall clock in seconds."""

    def __init__(self, directory: Path | None, now_s: Callable[[], float] = time.time) -> None:
        self._path = None if directory is None else directory / FILE
        self._now_s = now_s
        self._has_warned = False
        self._epoch, self.topics = self._read()

    def next_first_number(self) -> int:
        """Return the first batch number for a publisher process that starts now, larger than all earlier numbers, and
        save it.
        """
        self._epoch = min(MAX_EPOCH, max(self._epoch + 1, int(self._now_s())))
        self._write()
        return self._epoch << EPOCH_BITS

    def note(self, topic: str) -> None:
        """Remember that `topic` has been published."""
        if topic not in self.topics:
            self.topics = [*self.topics, topic][-MAX_TOPICS:]
            self._write()

    def _read(self) -> tuple[int, list[str]]:
        if self._path is None or not self._path.exists():
            return 0, []
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(_MAX_FILE_BYTES))
            epoch, topics = found["epoch"], found["topics"]
            if type(epoch) is int and 0 <= epoch <= MAX_EPOCH and all(isinstance(topic, str) for topic in topics):
                return epoch, list(topics)[-MAX_TOPICS:]
            why = "it holds no epoch"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = str(error)
        log.warning("%s cannot be used (%s): numbers of KV events follow the wall clock", self._path, why)
        return 0, []

    def _write(self) -> None:
        """Write the file, not synced: after a loss of power the wall clock orders the numbers."""
        if self._path is None:
            return
        content = json.dumps({"epoch": self._epoch, "topics": self.topics})
        try:
            replace_file(self._path, content.encode(), durable=False)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s cannot be written (%s): should the wall clock step back before the next start, subscribers of "
                    "KV events may miss that start", self._path, error.strerror,
                )  # fmt: skip
