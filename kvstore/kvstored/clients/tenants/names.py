"""The names behind digests, for people: names of tenants and of fingerprints.

The module owns the fingerprints that have names. It never decides anything: a digest without a name is shown as a
digest, and blocks, keys and leases do not depend on names. Saved names may therefore lag behind, and a name that a
crash takes comes back with the next client that says hello. Invariant: the names that are kept are bounded in number
and in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore_proto.fingerprint import Fingerprint, parse_fingerprint

MAX_NAMED_FINGERPRINTS = 4096  # of each kind; a client that makes up more of them still stores and finds its blocks
MAX_NAMED_BYTES = 4 << 20  # of all of a kind, in canonical form
_TENANT, _FINGERPRINT = b"tenant:", b"fingerprint:"
Entry = tuple[bytes, bytes]


def is_plain(name: str) -> bool:
    """Return whether `name` has only characters that a tenant's name may have: printable ASCII."""
    return name.isascii() and name.isprintable()


class Names:
    """A bounded collection of model fingerprints by digest, from which listings take the names that people see.
    Fingerprints with a version of weights, by which a bump finds older blocks, have room of their own."""

    def __init__(self) -> None:
        self.fingerprints: dict[bytes, Fingerprint] = {}
        self._entries: list[Entry] = []  # of the same, canonical
        self._held = {False: [0, 0], True: [0, 0]}  # number and bytes, without and with a version of weights

    def remember(self, digest: bytes, fingerprint: Fingerprint) -> None:
        """Keep `fingerprint` under `digest`, unless the collection is full."""
        held = self._held[bool(fingerprint.weights)]
        if digest in self.fingerprints or held[0] >= MAX_NAMED_FINGERPRINTS:
            return
        text = fingerprint.canonical()
        if held[1] + len(text) <= MAX_NAMED_BYTES:
            self.fingerprints[digest] = fingerprint
            self._entries.append((_FINGERPRINT + digest, text))
            held[0] += 1
            held[1] += len(text)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Drop the fingerprints with these `digests`, which no client will name again."""
        gone = set()
        for digest in digests:
            if (fingerprint := self.fingerprints.pop(digest, None)) is not None:
                gone.add(_FINGERPRINT + digest)
                held = self._held[bool(fingerprint.weights)]
                held[0] -= 1
                held[1] -= len(fingerprint.canonical())
        self._entries = [entry for entry in self._entries if entry[0] not in gone]

    def entries(self, tenants: Iterable[str]) -> list[Entry]:
        """Return the entries to save: one for each fingerprint in the collection, and one for each tenant name in
        `tenants`."""
        return [*((_TENANT + name.encode(), b"") for name in sorted(tenants)), *self._entries]

    def know(self, entries: Iterable[Entry]) -> list[str]:
        """Keep the fingerprints in the saved `entries`, and return the tenant names in them. Entries of other kinds are
        left out.
        """
        tenants = []
        for key, text in entries:
            if key.startswith(_TENANT):
                name = key.removeprefix(_TENANT).decode(errors="replace")
                tenants += [name] if is_plain(name) else []
                continue
            try:
                fingerprint = parse_fingerprint(text)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            if key == _FINGERPRINT + fingerprint.digest():
                self.remember(fingerprint.digest(), fingerprint)
        return tenants
