"""Bearer tokens: the identity of callers that the kernel cannot name, over TCP.

The module owns the content of the tokens file: SHA-256 digests, never tokens. A token is compared with all digests in a
time that does not depend on how much of it is right. The module does not decide what a tenant may do.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from pathlib import Path

from kvstored.clients.tenants.directory import Tenant
from kvstored.config import ConfigError
from kvstored.config.private_input import read_private_lines

_OF_NOTHING = frozenset(hashlib.sha256(text).digest() for text in (b"", b"\n"))
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}\Z")


class Tokens:
    """A table of bearer tokens: the SHA-256 digest of each token and the name of its tenant. `find_tenant(name)`
    returns the tenant, or None. `tenant_of` finds the tenant of a token as the caller sent it."""

    def __init__(self, entries: list[tuple[bytes, str]], find_tenant: Callable[[str], Tenant | None]) -> None:
        self._entries = entries
        self._find_tenant = find_tenant  # each time: what a name stands for can change

    def __len__(self) -> int:
        return len(self._entries)

    def replace(self, entries: list[tuple[bytes, str]]) -> None:
        """Use `entries` (digest and tenant name) as the tokens from now on."""
        self._entries = entries

    def tenant_of(self, token: str) -> Tenant | None:
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        found = None
        for known, name in self._entries:  # all of them, whichever fits
            if hmac.compare_digest(known, digest):
                found = name
        return None if found is None else self._find_tenant(found)


def load_tokens(
    path: Path, find_tenant: Callable[[str], Tenant | None], is_tenant: Callable[[str], bool] | None = None
) -> Tokens:
    """Return the table of bearer tokens in the file `path`. `find_tenant(name)` returns the tenant or None, and
    `is_tenant(name)` whether `find_tenant` finds it now or later. Raises ConfigError, which names the line, if other
    users can read the file, its form is wrong, or a tenant does not exist."""
    return Tokens(read_tokens(path, is_tenant or (lambda name: find_tenant(name) is not None)), find_tenant)


def read_tokens(path: Path, is_tenant: Callable[[str], bool]) -> list[tuple[bytes, str]]:
    """Return pairs of a bearer token's digest and its tenant's name, from the file `path`. `is_tenant(name)` returns
    whether a tenant exists. Raises ConfigError, which names the line, if other users can read the file, its form is
    wrong, or a tenant does not exist."""
    entries: list[tuple[bytes, str]] = []
    seen: dict[bytes, int] = {}
    for number, line in enumerate(read_private_lines("unary.tokens_file", path), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"unary.tokens_file: {path} line {number}"
        if len(words) != 2 or not _DIGEST.match(words[1]):
            raise ConfigError(
                f"{where}: write a tenant's name and the SHA-256 of its token in hex (printf %s TOKEN | sha256sum)"
            )
        if not is_tenant(words[0]):
            raise ConfigError(
                f"{where}: there is no tenant {words[0]!r}; list it under [[tenant]], or write the tenant that lists it"
            )
        digest = bytes.fromhex(words[1])
        if digest in _OF_NOTHING:
            raise ConfigError(f"{where}: this is the SHA-256 of an empty token, which anybody has; make it of a token")
        if digest in seen:
            raise ConfigError(f"{where}: the same token as in line {seen[digest]}")
        seen[digest] = number
        entries.append((digest, words[0]))
    if not entries:
        raise ConfigError(f"unary.tokens_file: {path} lists no token")
    return entries


def names_in(path: Path | None) -> frozenset[str]:
    """Return the tenant names in the tokens file `path`, without the checks of `read_tokens`. Return an empty set when
    `path` is None. Raises ConfigError for a file that cannot be read."""
    try:
        lines = path.read_text(errors="replace").splitlines() if path is not None else []
    except OSError as error:
        raise ConfigError(f"unary.tokens_file: cannot read {path}: {error.strerror}") from None
    return frozenset(words[0] for line in lines if (words := line.partition("#")[0].split()))
