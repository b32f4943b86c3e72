"""Stored blocks that no caller can reach, because the configuration gives their users another tenant name, and the
automatic move of blocks to their user's new name.

The rule: blocks that user N stored as tenant uid-N are never given to a tenant that does not list N. A tenant that is
newly listed with that user alone takes them over. If others can be that tenant too, or have a token for either, only an
operator may do so (admin/rename.py). No block is dropped. Runs at the start, before any client is served.
"""

from __future__ import annotations

import logging
import pwd
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

from kvstore_console.units import human_bytes
from kvstored.clients.tenants.directory import TenantDirectory, tenant_digest, uid_of
from kvstored.config import TenantSection
from kvstored.store.blocks import Residency

log = logging.getLogger(__name__)


class StoredAmounts:
    """A reader of how many blocks and bytes are stored under each tenant identity at present."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._numbers = {index.name: number for number, index in enumerate(residency.tenants)}

    def number(self, identity: str) -> int | None:
        """Return the number that the block index uses for `identity`, or None if nothing was ever stored under it."""
        return self._numbers.get(tenant_digest(identity).hex())

    def blocks(self, identity: str) -> int:
        number = self.number(identity)
        return 0 if number is None else self._residency.tenant_blocks(number)

    def nbytes(self, identity: str) -> int:
        """Return the bytes of the blocks of `identity` in the tier that has most of them."""
        number, tiers = self.number(identity), range(len(self._residency.tiers))
        return 0 if number is None else max(self._residency.tenant_bytes(number, tier) for tier in tiers)

    def show(self, identity: str) -> str:
        blocks = self.blocks(identity)
        return f"{blocks:,} block{'' if blocks == 1 else 's'} ({human_bytes(self.nbytes(identity))})"


def follow_users(tenants: TenantDirectory, residency: Residency, with_tokens: frozenset[str] = frozenset()) -> None:
    """Give each newly listed tenant that lists a single user the blocks which this user stored as an unlisted one. It
    is not done if other callers can be that tenant; `with_tokens` are the tenants that token holders can be. The change
    is on the medium when this returns. Raises OSError, with names unchanged."""
    keyring, stored = tenants.keyring, StoredAmounts(residency)
    before = keyring.bound()
    known = [f"uid-{uid}" for section in tenants.listed for uid in section.uids]
    known = [name for name in known if stored.blocks(name)]
    for name, identity in before.items():
        uid, section = uid_of(identity), tenants.section(name)
        if uid is not None and (section is None or uid not in section.uids):
            keyring.release(name)
            known.append(identity)
            where = "is not listed any more" if section is None else f"does not list uid {uid} any more"
            log.warning(
                "tenant %s %s: %s that it took over are %s's again", name, where, stored.show(identity), identity
            )
    for section in tenants.listed:
        keyring.claim(section.name)
        users = _to_take_over(section, tenants, stored)
        if users is not None and with_tokens.isdisjoint((users, section.name)):
            log.info("tenant %s takes over %s of %s", section.name, stored.show(users), users)
            keyring.bind(section.name, users)
    if keyring.bound() != before or not keyring.is_settled:
        try:
            keyring.settle()
        except OSError:
            keyring.adopt(before)
            raise
    tenants.refresh(*known)
    for sentence in out_of_reach(tenants, residency):
        log.warning("%s", sentence)


def out_of_reach(tenants: TenantDirectory, residency: Residency) -> list[str]:
    """Return one sentence, with reason and remedy, for each tenant that has blocks although no caller can act as this
    tenant."""
    stored = StoredAmounts(residency)
    found = []
    for tenant in tenants.all():
        identity = tenants.keyring.identity_of(tenant.name)
        if identity is None or not stored.blocks(identity):
            continue
        for why, heir in _reasons(tenant.name, tenants):
            found.append(
                f"{stored.show(identity)} of {tenant.name} are out of reach: {why}; {_way_on(tenant.name, heir)}"
            )
            break
    return found


def nobody(name: str, tenants: TenantDirectory) -> str:
    """Return a sentence, with reason and remedy, if no user can act as the tenant `name`, else ""."""
    for why, heir in _reasons(name, tenants):
        way_on = f"`kvctl tenants set {heir}` is what holds for that user" if heir else "list that user"
        return f"without a token for it nobody is {name}: {why}; {way_on}, `kvctl tenants reset {name}` ends this"
    return ""


def _to_take_over(section: TenantSection, tenants: TenantDirectory, stored: StoredAmounts) -> str | None:
    """Return the identity of the one user that a tenant lists, if it has blocks and the tenant has none."""
    keyring = tenants.keyring
    if (
        len(section.uids) != 1
        or any((section.gids, section.unmapped, section.cgroups, section.socket, section.certificates))
        or section.name in keyring.bound()
        or stored.blocks(section.name)
    ):
        return None
    identity = f"uid-{section.uids[0]}"
    return identity if keyring.holder(identity) is None and stored.blocks(identity) else None


def _reasons(name: str, tenants: TenantDirectory) -> Iterator[tuple[str, str]]:
    """Yield reasons why no caller is this tenant, each with the tenant that is in its place."""
    uid = uid_of(name)
    if uid is None:
        if tenants.section(name) is None:
            yield "the configuration does not list that tenant", ""
    elif (lister := tenants.lister(uid)) is not None:
        yield f"uid {uid} is tenant {lister.name}", lister.name
    elif not tenants.is_reachable(name):
        yield 'tenants.default is "refuse" and no tenant lists that user', ""
    elif (by_gid := _lister_by_group(uid, tenants)) is not None:
        yield f"uid {uid} is tenant {by_gid.name} by its group", ""


def _lister_by_group(uid: int, tenants: TenantDirectory) -> TenantSection | None:
    if not any(section.gids for section in tenants.listed):
        return None
    gid = _group_of(uid)
    return next((section for section in tenants.listed if gid in section.gids), None)


@lru_cache(maxsize=1024)  # the user database may be a directory service on the network
def _group_of(uid: int) -> int | None:
    with suppress(KeyError, OverflowError):
        return pwd.getpwuid(uid).pw_gid
    return None


def _way_on(name: str, heir: str) -> str:
    keep = f"`kvctl tenants rename {name} {heir or 'NEW'}` gives them to {heir or 'a tenant that is listed'}"
    if not heir and uid_of(name) is not None:
        keep = "list that user under uids of a tenant"
    return f"{keep}, `kvctl drop --all --yes --tenant {name}` frees their space"
