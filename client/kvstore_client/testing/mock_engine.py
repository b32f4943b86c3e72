"""A small engine without a model: K/V rows that depend on all tokens before them, in a paged pool.

It is the suite's own first client, and an example of a connector. Each row is computed from the row before it *as it
is in the pool*, as attention would: one wrong restored byte changes everything that follows, and the answer.
Owns its pool and its session. Never does: compute anything of use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_client import Fingerprint, LayerGroup, Session, connect
from kvstore_client.testing.setting import EngineSetting, PromptResult

LAYERS = 3
WIDTH = 8  # uint64 numbers in one row of K or V
BLOCK_TOKENS = 64  # of a stored block
PAGE_TOKENS = 16  # of a block of the pool
POOL_PAGES = 256
DEADLINE_S = 2.0
_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Page = npt.NDArray[np.uint64]


class MockEngine:
    """A small engine for tests, without a model: it computes K/V rows that depend on all tokens before them, in a paged
    pool. It stores and restores the rows through `session`. If `session` is None, it computes every prompt.
    """

    def __init__(self, model: str, session: Session | None) -> None:
        self._seed = int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "little")
        self._session = session
        self._pool = np.zeros((POOL_PAGES, LAYERS, 2, PAGE_TOKENS, WIDTH), np.uint64)
        self._free = [int(page) for page in np.random.default_rng(7).permutation(POOL_PAGES)]  # neighbours are rare
        self._ladder = (np.arange(LAYERS * 2 * WIDTH, dtype=np.uint64) * np.uint64(_PRIME)).reshape(LAYERS, 2, WIDTH)

    def store(self, tokens: Sequence[int]) -> None:
        table = self._allocate(len(tokens))
        try:
            self._compute(table, tokens, 0)
            if self._session is not None:
                payloads = [self._gather(table, block) for block in range(len(tokens) // BLOCK_TOKENS)]
                self._session.put(tokens, payloads=payloads)
        finally:
            self._free += table

    def restore(self, tokens: Sequence[int]) -> PromptResult:
        table = self._allocate(len(tokens))
        try:
            restored = self._load(table, tokens)
            self._compute(table, tokens, restored)
            return PromptResult(restored, self._digest(table, len(tokens)))
        finally:
            self._free += table

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _load(self, table: list[int], tokens: Sequence[int]) -> int:
        """Copy what the store has into the pool. Return the number of its tokens that are valid."""
        if self._session is None:
            return 0
        most = (len(tokens) - 1) // BLOCK_TOKENS  # the last token is computed in any case: it starts the answer
        with self._session.get(tokens, max_blocks=most) as lease:
            for block in range(len(lease)):
                self._scatter(table, block, lease.payload(block))
            return lease.tokens if lease.valid else 0  # asked after the copy: what was read before it counts

    def _compute(self, table: list[int], tokens: Sequence[int], start: int) -> None:
        """Compute the rows of tokens[start:], each from the row before it."""
        for position in range(start, len(tokens)):
            before = int(self._row(table, position - 1)[-1, 1, -1]) if position else self._seed
            state = ((before ^ int(tokens[position])) * _PRIME + position) & _MASK
            row = (self._ladder ^ np.uint64(state)) * np.uint64(_PRIME)
            self._row(table, position)[...] = row ^ (row >> np.uint64(29))

    def _row(self, table: list[int], position: int) -> Page:
        """Return the row of one token, uint64 [layers, 2, width], in place."""
        return self._pool[table[position // PAGE_TOKENS], :, :, position % PAGE_TOKENS]

    def _gather(self, table: list[int], block: int) -> npt.NDArray[np.uint8]:
        pages = self._pages(table, block)
        return np.concatenate([self._pool[page] for page in pages], axis=2).reshape(-1).view(np.uint8)

    def _scatter(self, table: list[int], block: int, payload: npt.NDArray[np.uint8]) -> None:
        rows = payload.view(np.uint64).reshape(LAYERS, 2, BLOCK_TOKENS, WIDTH)
        for index, page in enumerate(self._pages(table, block)):
            np.copyto(self._pool[page], rows[:, :, index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])

    def _pages(self, table: list[int], block: int) -> list[int]:
        per_block = BLOCK_TOKENS // PAGE_TOKENS
        return table[block * per_block : (block + 1) * per_block]

    def _digest(self, table: list[int], tokens: int) -> str:
        whole = np.concatenate([self._pool[page] for page in table], axis=2)[:, :, :tokens]
        return hashlib.blake2b(np.ascontiguousarray(whole).data, digest_size=16).hexdigest()

    def _allocate(self, tokens: int) -> list[int]:
        count = -(-tokens // PAGE_TOKENS)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, f"a prompt of {tokens} tokens is more than the pool holds"
        return taken


def mock_fingerprint(model: str) -> Fingerprint:
    group = LayerGroup(0, layers=tuple(range(LAYERS)), bytes_per_token_per_layer=2 * WIDTH * 8)
    return Fingerprint(
        f"mock {model}",
        weights_digest=f"mock {model}",
        kv_dtype="u64",
        block_tokens=BLOCK_TOKENS,
        engine_block_tokens=PAGE_TOKENS,
        groups=(group,),
    )


def open_mock_engine(setting: EngineSetting) -> MockEngine:
    """Return a mock engine for `setting`, connected to the daemon in `setting.socket_dir` if that is given."""
    if setting.socket_dir is None:
        return MockEngine(setting.model, None)
    session = connect(
        setting.socket_dir,
        fingerprint=mock_fingerprint(setting.model),
        client_name="mock-engine",
        connect_timeout_s=DEADLINE_S,
        deadline_s=DEADLINE_S,
        staging_bytes=1 << 20,
    )
    return MockEngine(setting.model, session)
