"""The users of each tenant by the listing in force, kept in a file, so that a later start knows whom its own listing
lacks.

A process keeps what it has mapped, also over the daemon's end. Who is listed no more may see no later block there:
the caller puts none into that memory. The module compares listings and maps no memory.
Invariant: a user that may map a tenant's memory is in the file before it may.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore_proto.replaced_file import remove_leftover
from kvstore_tiers.replaced_file import replace_file
from kvstored.config.schema import TenantSection
from kvstored.unsaved import Unsaved

log = logging.getLogger(__name__)
LISTING_FILE: Final = "listing.json"
_SEVERAL: Final = ("uids", "gids", "cgroups", "readers")  # who may map a tenant's memory; by a certificate nobody maps
_ONE: Final = ("publisher", "socket", "unmapped")
Users = frozenset[tuple[str, object]]


class ListedUsers:
    """The users that could map each tenant's memory since the last `settle`, as the file in `state_dir` has them. A
    file that cannot be read stands for everybody, and none for nobody.
    """

    def __init__(self, state_dir: Path, unsaved: Unsaved) -> None:
        self.path = state_dir / LISTING_FILE
        self._unsaved = unsaved
        self._saved: Mapping[str, Users] | None = None
        try:
            self._saved = _parsed(self.path.read_bytes())
        except FileNotFoundError:
            self._saved = {}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("%s cannot be read (%s): tenants' memory is used for no new blocks", self.path, error)

    def narrowed(self, sections: Sequence[TenantSection]) -> set[str]:
        """Return the names of the tenants whose memory some processes could map and cannot by `sections`, connected or
        not."""
        now = _users_by_name(sections)
        if self._saved is None:
            return set(now)
        return {name for name, users in self._saved.items() if users - now.get(name, frozenset())}

    def widen(self, sections: Sequence[TenantSection]) -> None:
        """Add the users of `sections` to the file, before they may map memory. Raises OSError."""
        now, saved = _users_by_name(sections), self._saved or {}
        self._save({name: saved.get(name, frozenset()) | now.get(name, frozenset()) for name in {*saved, *now}})

    def settle(self, sections: Sequence[TenantSection]) -> None:
        """Remove all users who are not in `sections` from the file, once no new block is put where these users could
        look. Without room for it the file stays as it is, which is noted."""
        try:
            self._save(_users_by_name(sections))
        except OSError as error:
            cost = "readers that are listed now and by the next start no more keep what they mapped"
            self._unsaved.failed(self.path, error, cost)

    def _save(self, users: Mapping[str, Users]) -> None:
        if users != self._saved or self._unsaved.concerns(self.path):
            replace_file(self.path, _content(users))
            self._saved = users
        else:
            remove_leftover(self.path)
        self._unsaved.saved(self.path)


def _users_by_name(sections: Sequence[TenantSection]) -> dict[str, Users]:
    return {section.name: _users(section) for section in sections}


def _users(section: TenantSection) -> Users:
    several = {(key, user) for key in _SEVERAL for user in getattr(section, key)}
    return frozenset(several | {(key, getattr(section, key)) for key in _ONE if getattr(section, key)})


def _content(users: Mapping[str, Users]) -> bytes:
    return json.dumps({name: sorted(users[name], key=repr) for name in sorted(users)}).encode()


def _parsed(content: bytes) -> dict[str, Users]:
    """Return the users in a file's `content`. Raises ValueError, TypeError and RecursionError."""
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return {name: frozenset((str(key), user) for key, user in users) for name, users in found.items()}
