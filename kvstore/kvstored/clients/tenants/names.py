"""The names behind digests, for people: of tenants and of fingerprints, in STATE_DIR/names.json.

The module owns that file and the fingerprints that have names. It decides nothing: a digest without a name is its own
label, and blocks, keys and leases do not depend on names. So the file may lag behind, and names lost in a crash come
back with the next client that says hello. Invariants: the names are bounded in number and in bytes; after the start the
control thread never writes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from kvstore_proto.fingerprint import Fingerprint, parse_fingerprint
from kvstore_tiers.replaced_file import replace_file
from kvstored.unsaved import RETRY_S, Unsaved

MAX_NAMED_FINGERPRINTS = 4096  # labels only; a client that makes up more of them still stores and finds its blocks
MAX_NAMED_BYTES = 4 << 20  # of all of them, in canonical form
PAUSE_S = 0.1  # between two writes of the file
COST = "after a restart listings show digests for names that are not in it, until their clients reconnect"
log = logging.getLogger(__name__)


def is_plain(name: str) -> bool:
    """Return whether `name` can be a tenant's name, listed or made of a user's number."""
    return name.isascii() and name.isprintable()


class Names:
    """The names. `tenants()` returns the current names of tenants. `run` is a task."""

    def __init__(self, path: Path, tenants: Callable[[], Iterable[str]], unsaved: Unsaved) -> None:
        self._path = path
        self._unsaved = unsaved
        self._on_medium = b""
        self._tenants = tenants
        self.fingerprints: dict[bytes, Fingerprint] = {}
        self._texts: list[str] = []  # of the same, canonical
        self._nbytes = 0
        self._changed = asyncio.Event()
        self._writing = threading.Lock()

    def load(self) -> list[str]:
        """Return the tenants in the file, and keep its fingerprints. A lost or damaged file costs labels, never
        blocks.
        """
        tenants: list[str] = []
        try:
            self._on_medium = self._path.read_bytes()
            raw = json.loads(self._on_medium)
            tenants = [name for name in raw["tenants"] if isinstance(name, str) and is_plain(name)]
            for text in raw["fingerprints"]:
                fingerprint = parse_fingerprint(str(text).encode())
                self._keep(fingerprint.digest(), fingerprint)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s cannot be read: %s", self._path, error.strerror)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            log.warning("%s is damaged: names are not known until their clients reconnect", self._path)
        return tenants

    def remember(self, digest: bytes, fingerprint: Fingerprint) -> None:
        if digest not in self.fingerprints and self._keep(digest, fingerprint):
            self.changed()

    def changed(self) -> None:
        """Note that a name changed, to save it soon."""
        self._changed.set()

    async def run(self) -> None:
        """Save changes, on another thread."""
        while True:
            await self._changed.wait()
            is_saved = await asyncio.to_thread(self.save)
            await asyncio.sleep(PAUSE_S if is_saved else RETRY_S)

    def close(self) -> None:
        """Save the remaining changes, after a write that is under way."""
        with self._writing:
            is_behind = self._changed.is_set()
        if is_behind:
            self.save()

    def save(self) -> bool:
        """Write the file, unless it is up to date; return whether it is now. After a failure, for example on a full
        disk, labels are missing at the next start, but the start and clients' sessions succeed.
        """
        with self._writing:
            self._changed.clear()  # first: a change from now on may miss this save
            tenants = ",\n".join(map(json.dumps, sorted(self._tenants())))
            fingerprints = ",\n".join(map(json.dumps, list(self._texts)))  # piece by piece: others want the GIL too
            content = f'{{"tenants": [\n{tenants}\n],\n"fingerprints": [\n{fingerprints}\n]}}\n'
            raw = content.encode()
            try:
                if raw != self._on_medium:
                    replace_file(self._path, raw)
            except OSError as error:
                self._unsaved.failed(self._path, error, COST)
                self._changed.set()
                return False
            self._on_medium = raw
            self._unsaved.saved(self._path)
            return True

    def _keep(self, digest: bytes, fingerprint: Fingerprint) -> bool:
        """Keep a fingerprint's name; return False if there is no room for it."""
        if len(self.fingerprints) >= MAX_NAMED_FINGERPRINTS:
            return False
        text = fingerprint.canonical().decode()
        if self._nbytes + len(text) > MAX_NAMED_BYTES:
            return False
        self.fingerprints[digest] = fingerprint
        self._texts.append(text)
        self._nbytes += len(text)
        return True
