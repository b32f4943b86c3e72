"""A lease of as many leading blocks of a prompt as are worth loading, for connectors that load before they compute.

It first leases the mapped blocks, chooses, and asks again, with a deadline, if blocks of slower tiers are worth it;
then it reports the time to the choice. Most prefixes are mapped whole and cost one round trip. A miss raises nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore_client.lease import Lease
from kvstore_client.results import REASON_LATE, Lookup, ResumePoint
from kvstore_client.session import Session
from kvstore_proto.fingerprint import LayerGroup
from kvstore_restore.choice import Chosen, Hit, LoadChoice, all_of

UNKNOWN_PATIENCE, UNKNOWN_LEAST_S, MOST_S = 4.0, 0.25, 10.0  # of the wait for slower tiers
LEAST_QUESTION_S = 0.025  # an answer takes 1 ms; a few that do not come, and no more is asked for a while
REASON_COMPUTED = "computing is faster than loading"


@dataclass(frozen=True, slots=True)
class PromptToLoad:
    """A prompt for which stored blocks may be loaded. `tokens` are its token ids, as `Session.get` takes them, and
    `count` is their number. At most the first `blocks` blocks are loaded. The engine holds the first `held` blocks
    already.
    """

    tokens: Any
    count: int
    blocks: int
    held: int = 0


@dataclass(slots=True)
class Leased:
    """The result of `lease_by_choice`: a lease on blocks that are expected to load faster than they are computed. Use
    the first `blocks` blocks of the prompt from `lease`, which include the blocks that the engine held already, then
    call `copied`. If `blocks` is not more than the engine held, there is nothing to load. `lookup_s` is the time of the
    lookup in seconds. `stored` is the number of leading blocks of the prompt that are stored. `reason` says why no more
    blocks are used.
    """

    lease: Lease
    blocks: int
    stored: int
    reason: str
    lookup_s: float
    _observe: Callable[[int], None] = field(repr=False)

    def copied(self, blocks: int) -> None:
        """Report that the first `blocks` blocks of the prompt are in the engine now, or 0 blocks if the lease had
        ended. Without this call, nothing is learned about the cost of loading.
        """
        self._observe(blocks)


@contextmanager
def lease_by_choice(
    session: Session,
    prompt: PromptToLoad,
    choice: LoadChoice | None,
    *,
    block_bytes: int,
    deadline_s: float | None = None,
) -> Iterator[Leased]:
    """Lease the leading blocks of `prompt` that are worth loading, and yield them for the `with` block. `choice`
    decides; None loads all that is stored. A block has `block_bytes` bytes. The first request takes at most
    `deadline_s` seconds (by default the session's), or less if computing the whole prompt is known to take less.
    """
    if choice is not None:
        deadline_s = bounded_wait_s(choice, prompt.held * session.block_tokens, prompt.count, deadline_s)
    begin = time.perf_counter()
    with session.get(prompt.tokens, max_blocks=prompt.blocks, deadline_s=deadline_s, promote=False) as mapped:
        lookup_s = time.perf_counter() - begin
        hit = _hit(prompt, len(mapped), mapped.resident_blocks, mapped.estimated_load_s, session, block_bytes)
        chosen = choice.choose(hit) if choice is not None else all_of(hit)
        wanted = prompt.held + chosen.blocks

        def observe(blocks: int) -> None:
            if choice is not None:
                choice.observe_load(hit, chosen, blocks - prompt.held, time.perf_counter() - begin)

        if not chosen.blocks or wanted <= len(mapped):
            reason = REASON_COMPUTED if wanted < mapped.resident_blocks else mapped.reason
            yield Leased(mapped, min(wanted, len(mapped)), mapped.resident_blocks, reason, lookup_s, observe)
            return
        wait_s = _wait_s(chosen, mapped.estimated_load_s)
        with session.get(prompt.tokens, max_blocks=wanted, deadline_s=wait_s, promote=True) as loaded:
            reason = loaded.reason or (REASON_COMPUTED if wanted < mapped.resident_blocks else "")
            yield Leased(loaded, min(wanted, len(loaded)), mapped.resident_blocks, reason, lookup_s, observe)


@dataclass(slots=True)
class LeasedGroups:
    """The result of `lease_groups_by_choice`, for a model of several layer groups: leases that together let the model
    resume after its first `blocks` blocks. Each of `parts` is a layer group, the numbers of its blocks to load, and the
    lease on them. There are no parts if nothing is to be loaded. Call `copied` at the end. `stored` is the longest
    boundary, in blocks, at which every group could resume. `reason` says why it is not longer, or not used.
    """

    parts: list[tuple[LayerGroup, range, Lease]]
    blocks: int
    stored: int
    reason: str
    lookup_s: float
    _observe: Callable[[int], None] = field(repr=False)

    @property
    def payload_bytes(self) -> int:
        return sum(lease.payload_bytes for _, _, lease in self.parts)

    @property
    def valid(self) -> bool:
        """Return whether all bytes that were copied until now are the leased bytes, because no lease has ended."""
        return all(lease.valid for _, _, lease in self.parts)

    def copied(self, blocks: int) -> None:
        """Report that the engine now holds the state after the first `blocks` blocks of the prompt. Report 0 if a lease
        had ended.
        """
        self._observe(blocks)


@contextmanager
def lease_groups_by_choice(
    session: Session, prompt: PromptToLoad, choice: LoadChoice | None, *, deadline_s: float | None = None
) -> Iterator[LeasedGroups]:
    """Lease the blocks that a model of several layer groups needs to resume at the longest boundary that suits every
    group, if loading them is expected to be faster than computing. Yield the leases for the `with` block. `choice`
    decides; None loads all that is stored. The first request takes at most `deadline_s` seconds (by default the
    session's).
    """
    if choice is not None:
        deadline_s = bounded_wait_s(choice, prompt.held * session.block_tokens, prompt.count, deadline_s)
    begin = time.perf_counter()
    point = session.resume_point(prompt.tokens, max_blocks=prompt.blocks, deadline_s=deadline_s)
    lookup_s, held = time.perf_counter() - begin, prompt.held
    if point.blocks <= held:
        yield LeasedGroups([], held, point.blocks, point.reason, lookup_s, lambda _: None)
        return
    wanted = [(group, needed_from(group, point.blocks, held, session.block_tokens)) for group in _groups_of(session)]
    hit = _hit_of_groups(session, prompt, point, wanted)
    chosen = choice.choose(hit, all_or_none=True) if choice is not None else all_of(hit)
    if not chosen.blocks:
        yield LeasedGroups([], held, point.blocks, REASON_COMPUTED, lookup_s, lambda _: None)
        return

    def observe(blocks: int) -> None:
        if choice is not None:
            choice.observe_load(hit, chosen, max(blocks - held, 0), time.perf_counter() - begin)

    until = time.perf_counter() + max(_wait_s(chosen, point.estimated_load_s), deadline_s or 0.0)
    with ExitStack() as leases:
        parts, reason = list[tuple[LayerGroup, range, Lease]](), ""
        for group, blocks in wanted:
            left_s = until - time.perf_counter()
            lease = leases.enter_context(_lease_of(session, prompt, group, blocks, left_s))
            parts.append((group, blocks, lease))
            if len(lease) < len(blocks):
                reason = lease.reason or REASON_LATE
                break
        if reason:
            observe(0)
            yield LeasedGroups([], held, point.blocks, reason, lookup_s, lambda _: None)
        else:
            yield LeasedGroups(parts, point.blocks, point.blocks, point.reason, lookup_s, observe)


def needed_from(group: LayerGroup, boundary: int, held: int, block_tokens: int) -> range:
    """Return the numbers of the blocks of `group` to load for a resume after `boundary` blocks, if the engine holds the
    first `held` blocks already. A sliding window or a recurrent state is loaded completely; of other groups only the
    blocks that the engine does not hold. A block has `block_tokens` tokens.
    """
    needed = group.needed_blocks(boundary, block_tokens)
    return range(held, boundary) if group.kind in ("full", "latent") else needed


def _groups_of(session: Session) -> Sequence[LayerGroup]:
    return session.fingerprint.groups


def _lease_of(session: Session, prompt: PromptToLoad, group: LayerGroup, blocks: range, left_s: float) -> Lease:
    return session.get(
        prompt.tokens, group=group.group_id, first_block=blocks.start, max_blocks=len(blocks), deadline_s=left_s
    )


def _hit_of_groups(
    session: Session, prompt: PromptToLoad, point: ResumePoint, wanted: Sequence[tuple[LayerGroup, range]]
) -> Hit:
    blocks = point.blocks - prompt.held
    nbytes = sum(len(each) * session.fingerprint.payload_bytes(group.group_id) for group, each in wanted)
    tier = "slower" if point.estimated_load_s else "host"
    count = max(prompt.count, point.tokens + 1)
    each_s = point.estimated_load_s / blocks
    first = prompt.held * session.block_tokens
    return Hit([tier] * blocks, [each_s] * blocks, session.block_tokens, nbytes // blocks, count, first)


def _hit(prompt: PromptToLoad, mapped: int, stored: int, load_s: float, session: Session, block_bytes: int) -> Hit:
    """Return the hit for the choice. The daemon gives one time for all blocks that are not mapped, so each gets an
    equal part.
    """
    held = prompt.held
    ready, slower = max(mapped - held, 0), max(stored - max(mapped, held), 0)
    each_s = load_s / slower if slower else 0.0
    first = held * session.block_tokens
    count = max(prompt.count, first + (ready + slower) * session.block_tokens + 1)
    tiers = ["host"] * ready + ["slower"] * slower
    return Hit(tiers, [0.0] * ready + [each_s] * slower, session.block_tokens, block_bytes, count, first)


def hit_of(found: Lookup, first: int, last: int, *, block_tokens: int, block_bytes: int, tokens: int, held: int) -> Hit:
    """Return the description of a hit that `LoadChoice` decides about: blocks `first` to `last` - 1 of the lookup
    result `found`. They follow the first `held` tokens of a prompt of `tokens` tokens. A block has `block_tokens`
    tokens and `block_bytes` bytes.
    """
    each_s = found.load_s or (found.estimated_load_s / max(found.blocks, 1),) * found.blocks
    return Hit(found.tiers[first:last], each_s[first:last], block_tokens, block_bytes, tokens, held)


def bounded_wait_s(choice: LoadChoice, held: int, count: int, deadline_s: float | None) -> float | None:
    """Return the most seconds that a request for a prompt may take: `deadline_s`, or the time to compute the prompt, if
    `choice` knows it and it is less. Of the prompt's `count` tokens the engine holds `held`.
    """
    computing_s = choice.known_compute_s(held, count - held)
    if math.isinf(computing_s):
        return deadline_s
    computing_s = max(computing_s, LEAST_QUESTION_S)
    return computing_s if deadline_s is None else min(deadline_s, computing_s)


def _wait_s(chosen: Chosen, estimated_s: float) -> float:
    if math.isinf(chosen.deadline_s):
        return min(max(UNKNOWN_PATIENCE * estimated_s, UNKNOWN_LEAST_S), MOST_S)
    return min(chosen.deadline_s, MOST_S)
