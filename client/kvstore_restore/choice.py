"""Chooses how many leading blocks of a hit a connector loads; the engine computes the rest. Learns both costs from
requests.

It is for engines that compute only behind loaded blocks. With n blocks loaded a first token takes

    own(n) + sum of bias(tier) * load_s over the n blocks + compute(rest of the prompt)

`own` is the client's own cost of a load (the call, the copy), a line in the bytes. `load_s` is the daemon's estimate,
with queues (`Lookup.load_s`); `bias` is the recent error of that estimate, a factor by tier. Within a run of blocks in
one tier the sum is concave in n, so its least value is at an end of a run: only those are compared.

A path that is not taken teaches nothing. So after `TRIAL_EVERY` decisions without it, fewer where it was taken only a
few times, some blocks take the other one, as soon as the predicted loss has been saved up: `TRIAL_SHARE` of the time of
each request may be lost to this. All blocks do if that is affordable and none did so for `WHOLE_TRIAL_EVERY`
decisions: if the paths are close, the time of a part says too little of the whole.
The module owns the trials; `LearnedCosts` has the learned costs. It loads and computes nothing. Safe for use by several
threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from time import time

from kvstore_restore.learned import MAPPED, LearnedCosts

TRIAL_SHARE, TRIAL_EVERY, WHOLE_TRIAL_EVERY = 0.015, 16, 128
_TRIAL_PART = 8  # one in so many blocks takes the other path in a trial, unless all of them do
_MOST_SAVED_S = 30.0
_FIRST_SHARE = 0.1  # of one request may be lost in advance, while a process has seen no step but the first
_PATIENCE, _LEAST_PATIENCE_S = 4.0, 0.05
_MAPPED_S = 1e-5  # a block whose predicted time is below needs no tier but the mapped one
_LEAST_WAIT_S = 2e-4  # of a load; less of it says nothing of the bias
_MOST_ENDS = 64  # of runs of blocks that are compared
_SAVE_EVERY = 64  # loads that were observed


@dataclass(frozen=True, slots=True)
class Hit:
    """A hit (stored blocks of a prompt) about which a choice is made. The prompt has `tokens` tokens, of which the
    engine holds the `first` tokens; the blocks follow them. `tiers` and `load_s` have one entry for each block: its
    tier, and the seconds that it adds to the time until all blocks are mapped. Raises ValueError if the blocks leave no
    token to compute, or differ in number.
    """

    tiers: Sequence[str]
    load_s: Sequence[float]
    block_tokens: int
    block_bytes: int
    tokens: int
    first: int = 0

    def __post_init__(self) -> None:
        if len(self.tiers) != len(self.load_s):
            raise ValueError(f"{len(self.tiers)} tiers and {len(self.load_s)} times for the same blocks")
        if min(self.block_tokens, self.block_bytes) < 1 or self.held(len(self.tiers)) >= self.tokens:
            raise ValueError("a block needs at least one token and one byte, and one token of a prompt is computed")

    def held(self, blocks: int) -> int:
        """Return the number of leading tokens that the engine holds once the first `blocks` blocks are loaded."""
        return self.first + blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class Chosen:
    """A decision about a hit (stored blocks of a prompt): load the first `blocks` blocks within `deadline_s` seconds,
    and compute the tokens behind them. `load_s` and `compute_s` are the predicted seconds. `wait_s` is the part of
    `load_s` that the daemon estimated, before it is corrected by the bias of `tier`. `is_trial` is True if another
    number of blocks is predicted to be a little better, and this one is tried to learn its cost.
    """

    blocks: int
    load_s: float = 0.0
    compute_s: float = 0.0
    deadline_s: float = 0.0
    wait_s: float = 0.0
    tier: str = ""
    is_trial: bool = False


def all_of(hit: Hit) -> Chosen:
    """Return the decision to load all blocks of `hit`, however long it takes, for a caller that knows no costs."""
    return Chosen(len(hit.tiers), deadline_s=math.inf, wait_s=sum(hit.load_s), tier=_slowest(hit, len(hit.tiers)))


class LoadChoice:
    """An object that decides how many stored blocks of a prefix to load, and learns the costs of loading and computing.
    It loads all blocks until a cost of computing is known. `costs` are costs learned before. `step_tokens` is the
    most tokens that the engine computes in one step; 0 stands for no limit.
    """

    def __init__(self, costs: LearnedCosts | None = None, *, step_tokens: int = 0) -> None:
        self._costs = costs or LearnedCosts()
        self._step_tokens = step_tokens
        self._saved_s = 0.0  # may be lost to trials
        self._since_load = self._since_compute = 0  # decisions since that path taught something
        self._since_all = {True: WHOLE_TRIAL_EVERY, False: WHOLE_TRIAL_EVERY}  # since all was loaded; was computed
        self._informative_tokens = 0  # so many at once say what those of the latest hit cost
        self._unsaved = 0
        self._lock = threading.RLock()

    def choose(self, hit: Hit, *, all_or_none: bool = False) -> Chosen:
        """Return the decision how many leading blocks of `hit` to load, and for how many seconds to try. With
        `all_or_none` it is all blocks or none.
        """
        with self._lock:
            return self._choose(hit, all_or_none) if hit.tiers else Chosen(0)

    def _choose(self, hit: Hit, all_or_none: bool) -> Chosen:
        whole = len(hit.tiers)
        self._since_load += 1
        self._since_compute += 1
        self._since_all = {is_load: count + 1 for is_load, count in self._since_all.items()}
        self._informative_tokens = (hit.tokens - hit.first) // _TRIAL_PART
        waits = self._waits(hit)
        if not self._costs.steps.is_known:
            return all_of(hit)
        nothing_s = self.compute_s(hit.first, hit.tokens - hit.first)
        ends = () if all_or_none else _ends_of_runs(hit)
        totals = {blocks: self._total_s(hit, blocks, waits) for blocks in (0, *ends, whole)}
        best = min(totals, key=lambda blocks: (totals[blocks], -blocks))
        self._saved_s = min(self._saved_s + TRIAL_SHARE * totals[best], _MOST_SAVED_S)
        tried = self._tried(hit, best, totals[best], waits, all_or_none)
        if tried is None:
            return self._chosen(hit, best, waits, nothing_s)
        self._saved_s -= self._total_s(hit, tried, waits) - totals[best]
        return self._chosen(hit, tried, waits, nothing_s, is_trial=True)

    def compute_s(self, first: int, tokens: int) -> float:
        """Return the predicted seconds to compute `tokens` tokens from position `first` on."""
        return self._costs.prefill_s(first, first + tokens, self._step_tokens)

    def known_compute_s(self, first: int, tokens: int) -> float:
        """Return the predicted seconds to compute `tokens` tokens from position `first` on, or infinity until a step
        was observed.
        """
        with self._lock:
            return self.compute_s(first, tokens) if self._costs.steps.is_known else math.inf

    def observe_compute(self, first: float, tokens: int, seconds: float) -> None:
        """Learn that one step of `tokens` tokens, from position `first` on, took `seconds`. For tokens of several
        requests, `first` is such that `tokens * (first + tokens / 2)` is the number of pairs of a token and a token
        that it attends to. A step much shorter than the latest hit teaches only the fixed time of every step.
        """
        with self._lock:
            if self._costs.observe_batch([(tokens, first)], seconds, least_tokens=self._informative_tokens):
                self._since_compute = 0

    def observe_load(self, hit: Hit, chosen: Chosen, blocks: int, seconds: float) -> None:
        """Learn that `blocks` of the blocks in the decision `chosen` for `hit` were loaded after `seconds`. Fewer
        blocks than chosen mean that the engine stopped waiting for the load.
        """
        if not chosen.blocks or seconds <= 0:
            return
        with self._lock:
            self._observe_load(hit, chosen, blocks, seconds)
            self._unsaved += 1
        if self._unsaved >= _SAVE_EVERY:
            self.save()

    def _observe_load(self, hit: Hit, chosen: Chosen, blocks: int, seconds: float) -> None:
        is_whole = blocks >= chosen.blocks
        nbytes = chosen.blocks * hit.block_bytes
        if chosen.wait_s < _LEAST_WAIT_S or not chosen.tier:
            self._costs.observe_load(MAPPED, nbytes, seconds if is_whole else 2 * seconds)
            return
        factor = (seconds - self._costs.load_s(MAPPED, nbytes)) / chosen.wait_s
        predicted = _predicted(hit, chosen.tier, chosen.blocks)
        self._costs.biases.observe(chosen.tier, predicted, factor, gave_up=not is_whole)

    def save(self, path: Path | None = None) -> None:
        """Save the learned costs in the file `path`, by default the one that they were loaded from."""
        self._unsaved = 0
        self._costs.save(path)

    @classmethod
    def load(cls, path: Path, *, step_tokens: int = 0, clock: Callable[[], float] = time) -> LoadChoice:
        """Return a choice with the costs that were saved in the file `path`. It saves them there again every 64 loads.
        `clock` returns seconds that go on over restarts.
        """
        return cls(LearnedCosts.load(path, clock), step_tokens=step_tokens)

    def _total_s(self, hit: Hit, blocks: int, waits: Sequence[float]) -> float:
        held = hit.held(blocks)
        return self._load_s(hit, blocks, waits) + self.compute_s(held, hit.tokens - held)

    def _load_s(self, hit: Hit, blocks: int, waits: Sequence[float]) -> float:
        return self._costs.load_s(MAPPED, blocks * hit.block_bytes) + waits[blocks] if blocks else 0.0

    def _waits(self, hit: Hit) -> list[float]:
        """Return, by number of leading blocks, the seconds that the daemon is expected to take until they are
        mapped.
        """
        biases = {tier: self._costs.biases.of(tier, _predicted(hit, tier, len(hit.tiers))) for tier in set(hit.tiers)}
        return list(accumulate(map(mul, map(biases.__getitem__, hit.tiers), hit.load_s), initial=0.0))

    def _chosen(
        self, hit: Hit, blocks: int, waits: Sequence[float], nothing_s: float, *, is_trial: bool = False
    ) -> Chosen:
        if blocks:
            self._since_load = 0
        if blocks in (0, len(hit.tiers)):
            self._since_all[blocks > 0] = 0
        held = hit.held(blocks)
        compute_s, load_s = self.compute_s(held, hit.tokens - held), self._load_s(hit, blocks, waits)
        if not blocks:
            return Chosen(0, compute_s=compute_s, is_trial=is_trial)
        # What has not come by then is computed: a load that hangs costs no more than it could have saved.
        patience_s = max(_PATIENCE * load_s, _LEAST_PATIENCE_S)
        deadline_s = min(patience_s, max(nothing_s - compute_s, 2 * load_s))
        return Chosen(blocks, load_s, compute_s, deadline_s, sum(hit.load_s[:blocks]), _slowest(hit, blocks), is_trial)

    def _tried(self, hit: Hit, best: int, best_s: float, waits: Sequence[float], all_or_none: bool) -> int | None:
        """Return more or fewer blocks than the best, as a trial; None if that would cost too much now, or teaches
        nothing.
        """
        whole = len(hit.tiers)
        if best < whole and self._since_load >= TRIAL_EVERY:
            room, sign = whole - best, +1
        elif best and self._since_compute >= min(TRIAL_EVERY, 2 ** min(self._costs.steps.count, TRIAL_EVERY)):
            room, sign = best, -1
        else:
            return None
        affordable_s = self._saved_s + (_FIRST_SHARE * best_s if self._costs.steps.is_provisional else 0.0)
        in_whole = [room] if self._since_all[sign > 0] >= WHOLE_TRIAL_EVERY else []
        in_part = [] if all_or_none else _halves(-(-room // _TRIAL_PART))
        for step in (*in_whole, *in_part):
            blocks = best + sign * step
            if sign < 0 and hit.tokens - hit.held(blocks) < self._informative_tokens:
                return None  # too short a step to say what tokens take
            if self._total_s(hit, blocks, waits) - best_s <= affordable_s:
                return blocks
        return None


def _halves(number: int) -> Iterator[int]:
    while number:
        yield number
        number //= 2


def _ends_of_runs(hit: Hit) -> list[int]:
    """Return where one tier's blocks are followed by another's; if there are too many, as many as fit."""
    tiers = [hit.tiers[block] if not _is_mapped(hit, block) else "" for block in range(len(hit.tiers))]
    ends = [at for at in range(1, len(tiers)) if tiers[at] != tiers[at - 1]]
    return ends[:: len(ends) // _MOST_ENDS + 1]


def _is_mapped(hit: Hit, block: int) -> bool:
    return hit.load_s[block] < _MAPPED_S


def _predicted(hit: Hit, tier: str, blocks: int) -> float:
    """Return the predicted seconds a byte for the blocks in `tier` among the first `blocks`."""
    of_tier = [seconds for name, seconds in zip(hit.tiers[:blocks], hit.load_s, strict=False) if name == tier]
    return sum(of_tier) / (len(of_tier) * hit.block_bytes) if of_tier else 0.0


def _slowest(hit: Hit, blocks: int) -> str:
    """Return the tier on which most of the time of these blocks is spent; "" if all are mapped."""
    spent: dict[str, float] = {}
    for block in range(blocks):
        if not _is_mapped(hit, block):
            spent[hit.tiers[block]] = spent.get(hit.tiers[block], 0.0) + hit.load_s[block]
    return max(spent, key=lambda tier: spent[tier], default="")
