"""Decides how much of a resident prefix to load rather than compute.

Pure: costs in, a plan out. It never loads anything.

All or nothing is optimal here: loading costs a constant plus a fixed cost per block, while computing a block costs more
the later its position (attention), so the sum over "load the first m, compute the rest" is concave in m and has its
minimum at an end. (Loading the end of a prefix while computing its start, as Cake does, can be faster than both; this
planner does not do that.)
"""

from dataclasses import dataclass

from kvstore_engine.restore.costs import CostModel


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Load `blocks` leading storage blocks (0: compute all). The two estimates are what was compared."""

    blocks: int
    load_s: float
    compute_s: float
    reason: str


def usable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Leading blocks that a prompt can do without computing: its last token is computed in any case."""
    return max(prompt_tokens - 1, 0) // block_tokens


def plan_restore(
    *,
    prompt_tokens: int,
    resident_blocks: int,
    block_tokens: int,
    block_bytes: int,
    estimated_load_s: float,
    step_tokens: int,
    costs: CostModel,
    present_tokens: int = 0,
) -> RestorePlan:
    """The plan for a prompt of which `resident_blocks` leading blocks are in the store.

    At least one token is left to compute: its logits are what generation starts from (`usable_blocks`).
    `estimated_load_s` is the store's figure for all resident blocks, `step_tokens` the size of a prefill step.
    `present_tokens` leading tokens are in the pool already, so that loading is worth what comes after them.
    """
    most = usable_blocks(prompt_tokens, block_tokens)
    usable = min(resident_blocks, most)
    present = present_tokens // block_tokens
    if usable <= present:
        return RestorePlan(0, 0.0, 0.0, "nothing resident" if most else "no full block before the prompt's last token")
    covered = usable * block_tokens
    load_s = costs.load_s((usable - present) * block_bytes, estimated_load_s * usable / resident_blocks)
    compute_s = costs.prefill_s(present_tokens, prompt_tokens, step_tokens) - costs.prefill_s(
        covered, prompt_tokens, step_tokens
    )
    if load_s > compute_s:
        return RestorePlan(0, load_s, compute_s, "computing is estimated to be faster than loading")
    return RestorePlan(usable, load_s, compute_s, "loading is estimated to be faster than computing")
