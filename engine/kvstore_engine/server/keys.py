"""API keys: their callers, tenants and priorities.

The module owns the file's format and the comparison. Keys are kept as digests only, compared in constant time, and
never logged or shown.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from kvstore_engine.errors import UsageError
from kvstore_proto.fingerprint import MAX_ACCOUNT_CHARACTERS, is_account

MAX_PRIORITY = 1000
_LEAST_KEY_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The owner of an API key: a tenant. `priority` is for requests that name no priority; a request may ask for at
    most `most_priority`.
    """

    tenant: str
    priority: int
    most_priority: int

    def allowed(self, asked: int | None) -> int:
        return self.priority if asked is None else min(asked, self.most_priority)


ANYBODY = KeyOwner("", 0, MAX_PRIORITY)
"""The caller of a server without keys, which only this machine can reach."""


class KeyRing:
    """The API keys of a server, kept as digests. With None instead of keys, every caller is accepted as `ANYBODY`."""

    def __init__(self, callers: dict[bytes, KeyOwner] | None) -> None:
        self._callers = callers

    @classmethod
    def read(cls, path: Path) -> KeyRing:
        """Return the keys in the file `path`, whose lines are `KEY TENANT [PRIORITY]`; "#" begins a comment. Raises
        UsageError; the message names the line and never the key.
        """
        try:
            lines = path.read_text("utf-8-sig").splitlines()
        except OSError as error:
            raise UsageError(f"cannot read the API keys in {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"the API keys in {path} are not UTF-8 text") from None
        callers: dict[bytes, KeyOwner] = {}
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if words:
                digest, caller = _entry(words, f"{path}, line {number}")
                if digest in callers:
                    raise UsageError(f"{path}, line {number}: this key is in an earlier line already")
                callers[digest] = caller
        if not callers:
            raise UsageError(f"{path} holds no API keys: write lines of 'KEY TENANT [PRIORITY]'")
        return cls(callers)

    @property
    def is_open(self) -> bool:
        return self._callers is None

    def caller(self, authorization: str | None) -> KeyOwner | None:
        """Return the owner of the key in the HTTP header `authorization` ("Bearer KEY"); None if the key is missing or
        unknown.
        """
        if self._callers is None:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip().encode("latin-1", "replace")) if scheme.lower() == "bearer" else b""
        found = None
        for digest, caller in self._callers.items():  # all of them: the time must not depend on which one matches
            if hmac.compare_digest(digest, given):
                found = caller
        return found


def _entry(words: list[str], where: str) -> tuple[bytes, KeyOwner]:
    if not 2 <= len(words) <= 3:
        raise UsageError(
            f"{where}: must be 'KEY TENANT [PRIORITY]', got {len(words)} word{'' if len(words) == 1 else 's'}"
        )
    key, tenant = words[:2]
    if len(key) < _LEAST_KEY_CHARACTERS:
        raise UsageError(f"{where}: a key needs at least {_LEAST_KEY_CHARACTERS} characters")
    if not is_account(tenant):
        raise UsageError(f"{where}: a tenant's name has at most {MAX_ACCOUNT_CHARACTERS} printable characters")
    priority = 0
    if len(words) == 3:
        try:
            priority = int(words[2])
        except ValueError:
            raise UsageError(f"{where}: the priority must be an integer, got {words[2]!r}") from None
        if abs(priority) > MAX_PRIORITY:
            raise UsageError(f"{where}: the priority must be {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}")
    return _digest(key.encode()), KeyOwner(tenant, priority, priority)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
