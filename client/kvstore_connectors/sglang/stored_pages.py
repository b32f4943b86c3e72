"""Pages of one rank in its session: their names, their order, which of them are stored, leases on them, and storing
them.

A page of a pool is one opaque block, behind the page before it in its chain: a stored prefix loses its end first. An
absent daemon, a full store or a missing page raises nothing, and nothing is evicted. Imports neither SGLang nor torch.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from kvstore_client.lease import Lease
from kvstore_client.results import Lookup
from kvstore_client.session import Session
from kvstore_connectors.page_keys import PageKeys
from kvstore_connectors.sglang.pages import KV, ending_in, whole_prefixes
from kvstore_proto.errors import KVStoreError
from kvstore_proto.identity import BlockKeys

log = logging.getLogger(__name__)
MOST_PAGES = 1 << 16  # about 16 MiB of hashes


class StoredPages:
    """SGLang's pages in the store: it finds, leases and stores them through one `session`. `form_of(pool)` returns a
    text with the properties of a pool that the session's fingerprint lacks. A page's key is a hash of SGLang's hash
    and this text.
    """

    def __init__(self, session: Session, form_of: Callable[[str], str]) -> None:
        self._session = session
        self._form_of = form_of

    def names(self, hashes: Sequence[str], pool: str = KV) -> BlockKeys | None:
        """Return the store's keys of the pages with SGLang's `hashes` in `pool`. Return None while there is no daemon,
        because the keys depend on a secret that the daemon hands out.
        """
        if not hashes:
            return None
        secret = self._session.keys([0] * self._session.block_tokens)
        return None if secret is None else PageKeys(secret[0]).of(hashes, self._form_of(str(pool)))

    def lookup(self, names: BlockKeys, deadline_s: float | None = None) -> Lookup:
        """Ask the daemon which of the pages `names` are stored, within `deadline_s` seconds. If the session is closed
        or the daemon refuses, no page counts as stored.
        """
        try:
            return self._session.lookup(keys=names, deadline_s=deadline_s)
        except KVStoreError as error:
            log.warning("pages cannot be looked up: %s", error)
            return Lookup()

    def present(self, hashes: Sequence[str], pool: str = KV, deadline_s: float | None = None) -> list[bool]:
        """Return for each page with one of `hashes` in `pool` whether it is stored. The lookup takes at most
        `deadline_s` seconds.
        """
        names = self.names(hashes, pool)
        tiers: Sequence[str] = () if names is None else self.lookup(names, deadline_s).tiers
        return [index < len(tiers) and tiers[index] != "absent" for index in range(len(hashes))]

    def restorable(
        self, hashes: Sequence[str], transfers: Sequence[Any], most: int, deadline_s: float | None = None
    ) -> tuple[set[int], dict[str, int]]:
        """Return two things about the pages `hashes`: the set of prefix lengths, up to `most` pages, that all pools can
        restore, and for each pool the longest prefix that it alone could restore. Each pool follows the rule of its
        PoolTransfer in `transfers`. The lookup of each pool takes at most `deadline_s` seconds.
        """
        usable = set(range(1, most + 1))
        hits: dict[str, int] = {}
        for transfer in transfers:
            present = self.present(hashes[: max(usable, default=0)], transfer.name, deadline_s)
            if transfer.hit_policy == "all_pages":
                whole = whole_prefixes(present)
            elif transfer.hit_policy == "trailing_pages":
                whole = ending_in(present, max(1, len(transfer.keys or ())))
            else:
                log.warning("pool %s asks by the rule %s, which is not known here", transfer.name, transfer.hit_policy)
                whole = set()
            if whole:
                hits[transfer.name] = max(whole)
            usable &= whole
        return usable, hits

    def leases(self, hashes: Sequence[str], pool: str, deadline_s: float) -> list[Lease] | None:
        """Return leases that hold all pages with these `hashes` in `pool`, in order. Return None, and hold nothing, if
        a page cannot be leased within `deadline_s` seconds.
        """
        names, ends = self.names(hashes, pool), time.monotonic() + deadline_s
        if names is None:
            return None
        held: list[Lease] = []
        with ExitStack() as undo:
            start = 0
            while start < len(names):  # one request names a limited number of them
                try:
                    lease = self._session.get(keys=names[start:], deadline_s=max(ends - time.monotonic(), 0.001))
                except KVStoreError as error:
                    log.warning("pages cannot be leased: %s", error)
                    return None
                undo.callback(lease.release)
                if not len(lease):
                    return None
                held.append(lease)
                start += len(lease)
            undo.pop_all()
        return held

    def put(
        self, hashes: Sequence[str], pool: str, payloads: Sequence[Any], *, before: str | None, nbytes: int | None
    ) -> list[bool]:
        """Store consecutive pages with these `hashes` in `pool`. They follow the page `before`; if it is None or not
        stored, they start a chain. `nbytes` is the size of a payload. Return for each page whether it is stored. If a
        payload fails to fill its slot, its error is raised.
        """
        names = self.names([*([] if before is None else [before]), *hashes], pool)
        if names is None:
            return [False] * len(hashes)
        first = len(names) - len(hashes)
        if first and not self.lookup(names[:1]).blocks:
            names, first = names[1:], 0
        try:
            receipt = self._session.put(keys=names, first_block=first, payloads=payloads, payload_bytes=nbytes)
        except KVStoreError as error:  # pages too large for the daemon, a closed session
            log.warning("pages are not stored: %s", error)
            return [False] * len(hashes)
        return [status in ("stored", "present") for status in receipt.statuses]


class PageChains:
    """A record of which page precedes each page, for the latest `most` pages. One thread uses it."""

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most = most
        self._before: OrderedDict[str, str] = OrderedDict()

    def saw(self, hashes: Sequence[str]) -> None:
        """Record that the pages with these `hashes` follow each other."""
        for before, after in pairwise(hashes):
            self._before[after] = before
            self._before.move_to_end(after)
        while len(self._before) > self._most:
            self._before.popitem(last=False)

    def before(self, page: str) -> str | None:
        return self._before.get(page)
