"""One answer under way: its tokens, how many of them are computed, and the blocks it holds.

The module owns the state that the parts of the engine work on, and its accounts. It takes no action. Invariants:
`tokens[:length]` are known, and K/V of [0, computed) are in the blocks of `block_table`. computed < length, except for
a moment within a step. A sequence without a block table waits; `swapped` is its K/V on the host, if any.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.answer import Answer
from kvstore_engine.batching.events import Usage
from kvstore_engine.batching.request import Request
from kvstore_engine.blocks.block_table import BlockTable
from kvstore_engine.blocks.host_pool import SwappedBlocks
from kvstore_engine.restore.session import KvSession

NO_SELECTION = 1 << 62


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one answer (number `index`) of `request` while it is computed: its tokens, how many of them have K/V
    (`computed`), and the pool blocks it holds. `order` numbers arrivals; `length` is the number of known tokens;
    `furthest` is the most tokens that ever had K/V. From position `selected_from` on, K/V came from tokens that left
    out pages.
    """

    request: Request
    index: int
    order: int
    arrived_s: float
    answer: Answer
    tokens: npt.NDArray[np.int32]
    length: int
    prompt_tokens: int
    session: KvSession | None = None
    computed: int = 0
    selected_from: int = NO_SELECTION
    generated: int = 0
    block_table: BlockTable | None = None
    swapped: SwappedBlocks | None = None
    since_s: float = 0.0
    level: float = 0.0
    is_requested: bool = False
    is_restoring: bool = False
    offered_blocks: int = 0
    is_forked: bool = False
    furthest: int = 0
    forecast_tokens: float = 0.0
    forecast_prefill_s: float = 0.0
    forecast_at: tuple[int, int, int] | None = None
    accounts: "Accounts" = field(default_factory=lambda: Accounts())

    @property
    def left(self) -> int:
        """The number of this answer's known tokens, prompt included, whose K/V are not computed yet."""
        return self.length - self.computed

    @property
    def exact(self) -> int:
        """The number of leading tokens whose K/V are what attention to all tokens gives: only these may be shared with
        other requests, or stored.
        """
        return min(self.computed, self.selected_from)

    @property
    def is_decoding(self) -> bool:
        """True if only one token is left to compute, the last one that was generated."""
        return self.generated > 0 and self.left == 1

    @property
    def held(self) -> BlockTable:
        """The table of the pool blocks that this running sequence holds. A waiting sequence holds none, and then this
        fails.
        """
        assert self.block_table is not None, "the sequence holds no blocks"
        return self.block_table

    def advance_to(self, end: int, source: str) -> int:
        """Record that the first `end` tokens have K/V. `source` says where the K/V of the new ones came from: "local",
        "daemon" or "computed". Return how many prompt tokens have K/V for the first time.
        """
        accounts = self.accounts
        new = max(0, min(end, self.prompt_tokens) - max(self.computed, min(self.furthest, self.prompt_tokens)))
        if source == "local":
            accounts.local += new
        elif source == "daemon":
            accounts.daemon += new
        else:
            accounts.computed += new
            accounts.recomputed += max(0, min(end, self.furthest) - self.computed)
        self.computed = end
        self.furthest = max(self.furthest, end)
        return new

    def retreat_to(self, computed: int, furthest: int, new: int) -> None:
        """Undo an `advance_to` with the source "daemon" whose blocks did not arrive. `computed` and `furthest` are the
        former positions, and `new` the number of prompt tokens that it had returned.
        """
        self.accounts.daemon -= new
        self.computed, self.furthest = computed, furthest

    def usage(self, now_s: float) -> Usage:
        """Return the figures of this answer at the time `now_s` (seconds)."""
        accounts = self.accounts
        first_s, last_s = accounts.first_s, accounts.last_s
        return Usage(
            prompt_tokens=self.prompt_tokens,
            local_tokens=accounts.local,
            daemon_tokens=accounts.daemon,
            computed_tokens=accounts.computed,
            recomputed_tokens=accounts.recomputed,
            generated_tokens=self.generated,
            queued_s=(now_s if accounts.admitted_s is None else accounts.admitted_s) - self.arrived_s,
            ttft_s=0.0 if first_s is None else first_s - self.arrived_s,
            tpot_s=(last_s - first_s) / (self.generated - 1) if first_s is not None and self.generated > 1 else 0.0,
            total_s=now_s - self.arrived_s,
            preemptions=accounts.preemptions,
            swaps=accounts.swaps,
        )


@dataclass(slots=True)
class Accounts:
    """The counts of one answer for its `Usage`: prompt tokens by the source of their K/V, and the times of its events
    in seconds.
    """

    local: int = 0
    daemon: int = 0
    computed: int = 0
    recomputed: int = 0
    preemptions: int = 0
    swaps: int = 0
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
