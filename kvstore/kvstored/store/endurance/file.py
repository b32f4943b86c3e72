"""The budget's file: one small JSON object, replaced as a whole and synced, so that a crash leaves the old or the new.

A file that cannot be read, or whose checksum is not its own, counts as an empty bucket: damage must not give budget
away. A file of version 1, which had no checksum, counts so too, once.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

import xxhash

from kvstore_tiers import failpoints
from kvstore_tiers.replaced_file import replace_file
from kvstored.store.endurance.budget import SavedBudget

log = logging.getLogger(__name__)
FILE_NAME = "endurance.json"
_VERSION = 2
failpoints.declare("endurance.after-rename", "an allotment of the endurance budget is in place, nothing of it is spent")


class BudgetFile:
    """`load` and `save` may wait for a device: not for the control thread, but at start and stop."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME

    def load(self) -> SavedBudget | None:
        """None on a first start."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("%s cannot be read (%s): the endurance budget starts empty", self.path, error.strerror)
            return SavedBudget(0, 0, 2**62, "")
        try:
            raw = json.loads(text)
            if raw["version"] != _VERSION:
                raise ValueError(f"version {raw['version']!r}")
            if raw.pop("xxh3") != _checksum(raw):
                raise ValueError("its checksum is wrong")
            return SavedBudget(
                max(0, int(raw["level_bytes"])), int(raw["monotonic_ns"]), int(raw["wall_ns"]), str(raw["boot_id"]),
                max(0, int(raw["spent_bytes"])),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            log.error("%s is damaged (%s): the endurance budget starts empty", self.path, error)
            return SavedBudget(0, 0, 2**62, "")

    def save(self, state: SavedBudget) -> None:
        """Raises OSError; the file is then the old or the new one, whole."""
        raw: dict[str, int | str] = {
            "version": _VERSION,
            "level_bytes": state.level_bytes,
            "monotonic_ns": state.monotonic_ns,
            "wall_ns": state.wall_ns,
            "boot_id": state.boot_id,
            "spent_bytes": state.spent_bytes,
        }
        raw["xxh3"] = _checksum(raw)
        replace_file(self.path, json.dumps(raw).encode() + b"\n")
        failpoints.hit("endurance.after-rename")


def _checksum(raw: dict[str, int | str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(raw, sort_keys=True).encode())


def boot_id() -> str:
    """Names this boot of the machine; empty where the kernel does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
