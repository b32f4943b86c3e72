"""The setting that says how much of a long context the next token of an answer reads.

The module owns the rule, as plain values. `kernels/page_choice.cpp` chooses the pages, by the bounds of their keys
(`kernels/page_bounds.py`).

A selection may keep a fixed set of keys for all that follows, as H2O (Zhang et al. 2023) does by the attention that
keys have had and SnapKV (Li et al. 2024) by what the end of a prompt looks at. Both depend on the queries so far:
blocks cut so serve no other question. KVzip (Kim et al. 2025) cuts without a query, for good. Quest (Tang et al. 2024)
drops nothing: a page's bounds are computed once, and each new token reads the pages whose bounds promise most. The last
is what is done here. A page that is not read stays in the pool, and the store's blocks stay whole and serve every
request.

Only new tokens of answers select. Prompts are computed with all of attention, so that their blocks have the bytes that
they have without a selection. Blocks with tokens that came from a selection have other bytes: they are neither stored
nor shared (`Sequence.exact`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvstore_engine.errors import UsageError

PAGE_TOKENS = 32  # kPageKeys of kernels/layout.h
RECENT_PAGES = 6  # kRecentPages of kernels/page_choice.cpp: read by every token, as is the first page, of the sinks
SELECT_HELP = (
    "the most pages of 32 tokens of a long context that a new token reads: a share such as 50%%, or a number from 8 on "
    "(default: all). Faster, other answers; prompts and stored blocks stay as they are; cpu alone"
)
LEAST_PAGES = RECENT_PAGES + 2  # with one at least to choose


@dataclass(frozen=True, slots=True)
class PageSelection:
    """The most pages (of 32 tokens) of a context that a new token of an answer reads in a layer: `share` of them, over
    0 and below 1, or `pages`, whichever is given. The first page and the last six are always read.
    """

    share: float = 0.0
    pages: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the selection that `text` names: a share such as "50%", or a number of pages such as "64". Raises
        UsageError.
        """
        try:
            if text.endswith("%"):
                share = float(text[:-1]) / 100
                if 0 < share < 1:
                    return cls(share=share)
            elif (pages := int(text)) >= LEAST_PAGES:
                return cls(pages=pages)
        except ValueError:
            pass
        raise UsageError(
            f"--select-pages takes a share between 0% and 100%, such as 50%, or a number of pages of {PAGE_TOKENS} "
            f"tokens from {LEAST_PAGES} on, not {text!r}"
        )

    def read_pages(self, context: int) -> int:
        """Return how many pages a token reads that sees `context` tokens, itself included; 0 if it reads all."""
        present = -(-context // PAGE_TOKENS)
        wanted = max(LEAST_PAGES, self.pages or int(self.share * present))
        return wanted if wanted < present else 0
