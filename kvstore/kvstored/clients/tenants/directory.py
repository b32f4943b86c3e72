"""Tenants and fingerprints by name and digest.

Blocks on disk carry digests only; `Names` gives their names back after a restart. The module does not decide what a
tenant may hold, and does not hold the secret for keys (`Keyring` does).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.identity import root_key
from kvstored.clients.tenants.keyring import Keyring
from kvstored.clients.tenants.names import Entry, Names
from kvstored.clients.tenants.peer import Peer
from kvstored.config import TenantSection
from kvstored.config.schema import PutSection
from kvstored.store.blocks import Residency

if TYPE_CHECKING:  # its library is in an extra
    from kvstored.clients.tenants.data_keys import DataKeyFile

MAX_NUMBERED_FINGERPRINTS = 65_536
UNKNOWN_FINGERPRINT = 1 << 40  # a number that no block has
UNNUMBERED_FINGERPRINT = UNKNOWN_FINGERPRINT + 1  # the number of all that came too late for one of their own
_NO_DIGEST = bytes(32)
_UID_TENANT = re.compile(r"uid-(0|[1-9]\d{0,9})\Z")


@dataclass(frozen=True)
class Tenant:
    """A tenant: the owner of blocks. `digest` (16 bytes) names the tenant in block headers and in the block index. The
    keys of its blocks are made from `secret`, which never leaves the daemon."""

    name: str
    digest: bytes
    secret: bytes = field(repr=False)
    limits: TenantSection

    def puts_in_place(self, put: PutSection) -> bool:
        """Return whether this tenant's clients may write blocks directly into arenas (instead of staging memory). `put`
        is the section of the configuration with the default."""
        own = self.limits.put_in_place
        return put.in_place if own is None else own

    @property
    def index_name(self) -> str:
        """The tenant's name in the block index and as an owner of arenas: its digest in hex, which stays when the
        tenant is renamed.
        """
        return self.digest.hex()

    def roots(self, fingerprint: Fingerprint) -> list[bytes]:
        digest = fingerprint.digest()
        return [root_key(self.secret, digest, group.group_id) for group in fingerprint.groups]


def uid_of(name: str) -> int | None:
    """Return the user id in a tenant name of the form "uid-N", or None for any other name."""
    return int(name.removeprefix("uid-")) if _UID_TENANT.match(name) else None


def _family_of(fingerprint: Fingerprint) -> tuple[str, str, int]:
    return fingerprint.model_name, fingerprint.account, fingerprint.shard_index


def tenant_digest(identity: str) -> bytes:
    return hashlib.blake2b(identity.encode(), digest_size=16, person=b"kvstore tenant").digest()


class TenantDirectory:
    """A directory of tenants: it finds the tenant of a caller, and remembers the names behind digests. `listed` are the
    tenants in the configuration; `default` says what happens to users that none of them lists.
    """

    def __init__(
        self,
        state_dir: Path,
        listed: tuple[TenantSection, ...],
        default: str,
        keyring: Keyring | None = None,
    ) -> None:
        self.keyring = Keyring(state_dir) if keyring is None else keyring
        self.listed = listed
        self.default = default
        self._tenants: dict[str, Tenant] = {}
        self._fingerprint_numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = []  # by number
        self._families: dict[tuple[str, str, int], set[int]] = {}
        self._names = Names()
        self.data_keys: DataKeyFile | None = None
        self.encrypts_by_default = False
        self._encrypts: dict[bytes, bool | None] = {}
        for name in self.keyring.bound():
            if self.keyring.identity_of(name) is not None:
                self._tenant(TenantSection(name))
        for section in listed:
            self.keyring.claim(section.name)
            self._tenant(section)

    def named_entries(self, residency: Residency) -> list[Entry]:
        """Return the entries to save: the names of all known fingerprints, and of the tenants that have blocks in the
        block index `residency`."""
        numbers = {index.name: number for number, index in enumerate(residency.tenants)}
        with_blocks = (
            tenant.name for tenant in self._tenants.values()
            if tenant.index_name in numbers and residency.tenant_blocks(numbers[tenant.index_name])
        )  # fmt: skip
        return self._names.entries(with_blocks)

    def know(self, entries: Iterable[Entry]) -> None:
        """Add the names of fingerprints and tenants in the saved `entries`."""
        for name in self._names.know(entries):
            if name not in self._tenants and self.keyring.identity_of(name) is not None:
                self._tenant(TenantSection(name))
        for digest, number in self._fingerprint_numbers.items():
            if (fingerprint := self.fingerprint(digest)) is not None:
                self._join_family(fingerprint, number)

    def relist(self, listed: tuple[TenantSection, ...], default: str) -> None:
        """Replace the configured tenants: `listed` are the new ones, and `default` says what happens to users that none
        of them lists. Open sessions keep their tenant; the caller must close each session that belongs to another
        tenant now."""
        left = {section.name for section in self.listed} - {section.name for section in listed}
        self.listed, self.default = listed, default
        for section in (*listed, *map(TenantSection, sorted(left))):
            self._tenant(section)

    def resolve(self, peer: Peer) -> Tenant | None:
        """Return the tenant of the process `peer`: the one to whose own socket it connected, otherwise the one that
        lists its cgroup, otherwise its user id, otherwise its group id, otherwise the default. Return None if the
        process is refused; `why_refused` has the reason. An id that the kernel shows for any user or group outside the
        daemon's user namespace finds only a tenant whose setting `unmapped` allows that."""
        if peer.socket_of:
            own = self.section(peer.socket_of)
            return self._callable(own) if own is not None and own.socket else None
        if self._wants_control_group(peer):
            return None  # it may be in a cgroup that is another tenant than its user
        by_cgroup = self._lister_of(peer.control_group)
        if by_cgroup is not None:
            return self._callable(by_cgroup)
        if peer.has_no_uid:
            strangers = next((section for section in self.listed if section.unmapped), None)
            return None if strangers is None else self._callable(strangers)
        if (by_uid := self.lister(peer.uid)) is not None:
            return self._callable(by_uid)
        for section in self.listed:
            if peer.gid in section.gids:
                return None if peer.has_no_gid and not section.unmapped else self._callable(section)
        if self.default == "refuse":
            return None
        name = f"uid-{peer.uid}"
        if self.keyring.identity_of(name) is None:
            return None  # its blocks are those of another name
        known = self._tenants.get(name)
        if known is None:
            known = self._tenant(TenantSection(name, uids=(peer.uid,)))
        return known

    def pool(self, name: str, caller: Tenant) -> tuple[Tenant, bool] | None:
        """Return the shared pool `name`, and whether its user `caller` may put blocks into it. Return None alike for a
        pool that does not list `caller` and for a name that is no pool's."""
        section = self.section(name)
        if section is None or not section.is_pool or caller.name not in (section.publisher, *section.readers):
            return None
        pool = self._callable(section)
        return None if pool is None else (pool, caller.name == section.publisher)

    def by_certificate(self, names: Iterable[str]) -> Tenant | None:
        """Return the tenant that lists one of `names`, the names in a client's certificate such as "dns:a.example".
        Return None if no tenant lists any, or several tenants do."""
        given = set(names)
        found = [section for section in self.listed if not given.isdisjoint(section.certificates)]
        return self._callable(found[0]) if len(found) == 1 else None

    def _wants_control_group(self, peer: Peer) -> bool:
        return not peer.control_group and any(section.cgroups for section in self.listed)

    def _lister_of(self, control_group: str) -> TenantSection | None:
        """Return the section that lists the cgroup `control_group`, or the nearest one above it."""
        while control_group:
            for section in self.listed:
                if control_group in section.cgroups:
                    return section
            control_group = control_group.rpartition("/")[0]
        return None

    def why_refused(self, peer: Peer) -> str:
        """Return a sentence that says why `resolve` returned None for the process `peer`, and what to do."""
        if peer.socket_of:
            return f"the tenant {peer.socket_of} has no socket of its own any more: socket = true in its [[tenant]]"
        if self._wants_control_group(peer):
            return (
                "the daemon cannot see this process's cgroup (of version 2), and [[tenant]] cgroups say who is which "
                "tenant: connect again; let the daemon see the host's processes, or give the tenant socket = true"
            )
        if peer.has_no_uid:
            what, number = "user", peer.uid
        elif peer.has_no_gid and any(peer.gid in section.gids for section in self.listed):
            what, number = "group", peer.gid
        elif not self.keyring.is_settled:
            return f"{self.keyring.path} cannot be written, and a new tenant is closed until it is: free room there"
        else:
            return f"uid {peer.uid} belongs to no tenant; list it under [[tenant]] uids"
        return (
            f"the daemon's user namespace does not map this {what}: it sees {number}, as for every other one; map it "
            "there, or write unmapped = true in the [[tenant]] that all of them are to share"
        )

    def named(self, name: str) -> Tenant | None:
        """Return the tenant `name` to which an operator may give a bearer token: one that the configuration lists, or
        "uid-N" if unlisted users are tenants. Return None if there is no tenant of this name, or it is closed because
        its identity is not saved yet."""
        if not self.is_named(name):
            return None
        if (section := self.section(name)) is not None:
            return self._callable(section)
        uid = uid_of(name)
        return self._tenant(TenantSection(name, uids=() if uid is None else (uid,)))

    def is_named(self, name: str) -> bool:
        """Return whether `named` finds a tenant `name` now, or will find it as soon as it is not closed any more."""
        if (section := self.section(name)) is not None:
            return not section.is_pool and (not self.keyring.is_kept(name) or self._callable(section) is not None)
        return self.default != "refuse" and uid_of(name) is not None and self.keyring.identity_of(name) is not None

    def section(self, name: str) -> TenantSection | None:
        """Return the configuration's section for the tenant `name`, or None when it is not listed."""
        return next((section for section in self.listed if section.name == name), None)

    def lister(self, uid: int) -> TenantSection | None:
        """Return the configuration's section of the tenant that lists the user id `uid`, or None when none does. The
        settings of a tenant uid-N list no one: it is still the tenant of a user whom none lists."""
        listing = (section for section in self.listed if uid in section.uids)
        return next((section for section in listing if uid_of(section.name) is None), None)

    def is_reachable(self, name: str) -> bool:
        """Return whether any caller can act as the tenant `name`: the configuration lists it, or it is the tenant of a
        user whom no listed tenant has."""
        uid = uid_of(name)
        if uid is None:
            return self.section(name) is not None
        return self.default != "refuse" and self.lister(uid) is None

    def refresh(self, *names: str) -> None:
        """Look up the identities (from which keys are made) of all known tenants again, after names were given other
        identities, and add the tenants `names`."""
        for name, tenant in list(self._tenants.items()):
            if self.keyring.identity_of(name) is None:
                del self._tenants[name]
            else:
                self._tenant(tenant.limits)
        for name in (*names, *self.keyring.bound()):
            if name not in self._tenants and self.keyring.identity_of(name) is not None:
                self._tenant(self.section(name) or TenantSection(name))

    def by_digest(self, digest: bytes) -> Tenant | None:
        return next((tenant for tenant in self._tenants.values() if tenant.digest == digest), None)

    def remote_mode(self, digest: bytes) -> str:
        """Return the setting `remote` of the tenant with this `digest`, which says how its blocks are stored in remote
        tiers. Return "" if the tenant has no such setting."""
        tenant = self.by_digest(digest)
        return tenant.limits.remote if tenant is not None else ""

    def encrypts(self, digest: bytes) -> bool:
        """Return whether new blocks of the tenant with this `digest` are encrypted at rest. Any thread may call it."""
        own = self._encrypts.get(digest)
        return self.encrypts_by_default if own is None else own

    def number(self, name: str, residency: Residency) -> int:
        """Return the number that the block index uses for the tenant `name`. Raises KVStoreError if there is no such
        tenant.
        """
        tenant = self._tenants.get(name)
        if tenant is None:
            known = ", ".join(sorted(self._tenants)) or "none yet"
            raise KVStoreError(ErrorKind.NOT_FOUND, f"no tenant {name!r}; known: {known}")
        return residency.tenant(tenant.index_name)

    def name_of_index(self, index_name: str) -> str:
        """Return the name to show for the tenant that the block index calls `index_name` (its digest in hex)."""
        return self.name_of(bytes.fromhex(index_name))

    def name_of(self, digest: bytes) -> str:
        tenant = self.by_digest(digest)
        return tenant.name if tenant else f"unknown-{digest.hex()[:8]}"

    def all(self) -> list[Tenant]:
        return list(self._tenants.values())

    def remember(self, fingerprint: Fingerprint) -> bytes:
        """Remember `fingerprint`, so that listings can show its name. Return its digest."""
        digest = fingerprint.digest()
        self._names.remember(digest, fingerprint)
        number = self._fingerprint_numbers.get(digest)
        if number is not None:
            self._join_family(fingerprint, number)
        return digest

    def fingerprint_number(self, digest: bytes) -> int:
        """Return the number that stands for the fingerprint `digest` while the daemon runs. At most
        MAX_NUMBERED_FINGERPRINTS get a number of their own; all others share one, so listings show them as one."""
        number = self._fingerprint_numbers.get(digest)
        if number is None:
            number = len(self._digests)
            if number >= MAX_NUMBERED_FINGERPRINTS:
                return UNNUMBERED_FINGERPRINT
            self._fingerprint_numbers[digest] = number
            self._digests.append(digest)
            known = self.fingerprint(digest)
            if known is not None:
                self._join_family(known, number)
        return number

    def family(self, fingerprint: Fingerprint | None) -> Set[int]:
        """Return the numbers of the known fingerprints with the same model name, account and shard as `fingerprint`; a
        user may have meant them to be equal to it. The set grows when more become known, and is empty when
        `fingerprint` is None."""
        return frozenset() if fingerprint is None else self._families.get(_family_of(fingerprint), frozenset())

    def _join_family(self, fingerprint: Fingerprint, number: int) -> None:
        self._families.setdefault(_family_of(fingerprint), set()).add(number)

    def known_number(self, digest: bytes) -> int:
        """Return the number of the fingerprint `digest`. If it is not known, return a number that no block has."""
        return self._fingerprint_numbers.get(digest, UNKNOWN_FINGERPRINT)

    def fingerprint_digest(self, number: int) -> bytes:
        """Return the digest of the fingerprint with this `number`, or zeros if the number stands for none or for
        several."""
        return self._digests[number] if number < len(self._digests) else _NO_DIGEST

    def fingerprint(self, digest: bytes) -> Fingerprint | None:
        return self._names.fingerprints.get(digest)

    def state_kind(self, number: int, group_id: int) -> str:
        """Return the kind of state ("full attention", say) of a layer group of the fingerprint with this number, or ""
        when it is not known.
        """
        known = self.fingerprint(self.fingerprint_digest(number))
        group = None if known is None else known.group(group_id)
        return "" if group is None else group.kind

    def window_blocks(self, number: int, group_id: int) -> int:
        """Return how many of the last blocks of a prefix are needed to continue a computation after it, for the layer
        group `group_id` of the fingerprint with this `number`. The result 0 stands for all blocks, and for an unknown
        fingerprint."""
        known = self.fingerprint(self.fingerprint_digest(number))
        group = None if known is None else known.group(group_id)
        return 0 if known is None or group is None else group.window_blocks(known.block_tokens)

    def fingerprint_label(self, digest: bytes) -> str:
        known = self._names.fingerprints.get(digest)
        if known is None:
            return digest.hex()[:12]
        return f"{known.model_name}:{digest.hex()[:12]}" + (f" for {known.account}" if known.account else "")

    def fingerprints(self) -> dict[bytes, Fingerprint]:
        return dict(self._names.fingerprints)

    def forget_fingerprints(self, digests: Iterable[bytes]) -> None:
        """Forget the names of fingerprints, under which no block will be stored again."""
        self._names.forget(digests)

    def _callable(self, section: TenantSection) -> Tenant | None:
        """Return a listed tenant for its callers. None as long as its name stands for blocks of a user whom it does not
        list (`follow_users` ends that), or as long as its identity is not on the medium, where a restart would not
        find it.
        """
        uid = uid_of(self.keyring.claim(section.name))
        if not self.keyring.is_kept(section.name):
            return None
        return self._tenant(section) if uid is None or uid in section.uids else None

    def _tenant(self, section: TenantSection) -> Tenant:
        known = self._tenants.get(section.name)
        identity = self.keyring.claim(section.name)
        digest = tenant_digest(identity)
        if known is None or known.limits != section or known.digest != digest:
            secret = hmac.new(self.keyring.secret, b"tenant\0" + identity.encode(), hashlib.sha256).digest()
            known = Tenant(section.name, digest, secret, section)
            self._tenants[section.name] = known
            self._encrypts[digest] = section.encrypt
        return known
