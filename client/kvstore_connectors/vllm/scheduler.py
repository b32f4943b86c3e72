"""The scheduler side: the blocks to load for a new request, the blocks that each step fills, and the requests that gave
up their blocks.

The module owns the bookkeeping of running requests; the choice decides how much of a hit is loaded. It reads vLLM's
requests and scheduler outputs by attribute and imports nothing of it, so that plain records can test it. It never reads
or writes K/V, and never fails a request; blocks for which the store does not answer in time are computed.

Invariants: only whole blocks are loaded or stored; a block is ordered to be stored by the step that fills it, or a
later one while its request holds it; after a failed load vLLM takes computed tokens back, and those blocks are ordered
again; a request whose pool blocks were freed is named in `ended` of the very next orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore_client.results import REASON_NO_DAEMON, Lookup
from kvstore_client.session import Session
from kvstore_client.trace import traced
from kvstore_connectors.load import hit_of
from kvstore_connectors.vllm.answers import EndedAnswer
from kvstore_connectors.vllm.group_orders import GroupOrders, GroupsOfRequest, Survey, survey
from kvstore_connectors.vllm.groups import Skipped, StateGroups
from kvstore_connectors.vllm.identity import Extras, address
from kvstore_connectors.vllm.load_bounds import loadable_blocks, restorable_at_most
from kvstore_connectors.vllm.orders import LoadOrder, Place, RequestPrefix, SaveOrder, StepOrders, StepReport
from kvstore_proto.errors import KVStoreError
from kvstore_proto.identity import pack_tokens
from kvstore_restore.choice import Chosen, Hit, LoadChoice, all_of

TOKEN_BYTES = 4
_WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")  # names of vLLM's RequestStatus
DescribeExtras = Callable[[Any], Extras | str]
"""What a vLLM request depends on apart from tokens; a string says why that cannot be named: it is not stored then."""


@dataclass(frozen=True, slots=True)
class LoadRules:
    """The rules for loading hits. `choice` decides how many blocks are loaded; if it is None, all found blocks are. A
    block has `block_bytes` bytes. A load takes at most `deadline_s` seconds. A load that is expected to wait longer
    than `beside_s` seconds for slower tiers runs beside the engine's steps, for at most `beside_deadline_s` seconds.
    """

    choice: LoadChoice | None
    block_bytes: int
    deadline_s: float = 0.5
    beside_s: float = 0.02
    beside_deadline_s: float = 10.0


@dataclass(slots=True)
class _Tracked:
    """A request from its first look-up to its end. Its first `stored_blocks` blocks need no order to store. `loading`:
    the hit that was chosen to be loaded. `tried_at`: its preemptions when that began. `reached_tokens` were computed
    or loaded, if no load has failed since.
    """

    request: Any
    extras: Extras | None  # None: not to be named, so neither loaded nor stored
    stored_blocks: int = 0
    groups: GroupsOfRequest | None = None  # where `GroupOrders` makes its orders
    external_tokens: int = 0
    local_tokens: int = 0
    preemptions: int = 0
    local_blocks: int = 0
    tiers: tuple[str, ...] = ()
    loading: tuple[Hit, Chosen] | None = None
    is_beside: bool = False
    tried_at: int = -1
    reached_tokens: int = 0


class SchedulerSide:
    """The part of the vLLM connector that runs in the scheduler's process. It decides which blocks to load and to
    store, and makes the orders for the workers. `sessions` has one session for the shard of each rank; a block counts
    as stored if every rank has stored it. `on_answer` is called with each answer that has ended.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        describe: DescribeExtras,
        *,
        groups: StateGroups,
        loads: bool,
        saves: bool,
        lookup_deadline_s: float,
        rules: LoadRules,
        on_answer: Callable[[EndedAnswer], None] | None = None,
    ) -> None:
        self._sessions = sessions
        self._on_answer = on_answer
        self._describe = describe
        self._block_tokens = groups.block_tokens
        self._groups = groups
        self._group_orders: GroupOrders | None = None
        self._loads, self._saves = loads, saves
        self._lookup_deadline_s, self._rules = lookup_deadline_s, rules
        self._beside: list[LoadOrder] = []
        self._requests: dict[str, _Tracked] = {}
        self._ended: list[str] = []

    def use_rule(self, skipped: Skipped) -> None:
        """Set `skipped`, vLLM's rule of how many leading tokens a group of layers does not need after some tokens. It
        comes from vLLM's cache managers, which exist only later.
        """
        if not self._groups.is_plain:
            self._group_orders = GroupOrders(self._groups, skipped)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """Return two values about `request`. The first is the number of tokens to load beyond the `computed_tokens`
        tokens in vLLM's own prefix cache, because loading is expected to be faster than computing. The second is True
        if they are loaded while the engine goes on with other requests.
        """
        tracked = self._track(request)
        most = restorable_at_most(request.num_tokens, self._block_tokens)
        if tracked.extras is None or not self._loads or request.skip_reading_prefix_cache or not most:
            return 0, False
        local = tracked.local_blocks = computed_tokens // self._block_tokens
        tracked.local_tokens = computed_tokens
        if self._group_orders is not None:
            return self._matched_groups(tracked, self._group_orders, most)
        found = self._lookup(self._prefix(tracked, most))
        tracked.stored_blocks, tracked.tiers, tracked.reached_tokens = found.blocks, found.tiers, 0
        blocks = loadable_blocks(found, most, self._rules.beside_deadline_s)
        if blocks <= local or tracked.tried_at == request.num_preemptions:  # what failed once is computed
            return 0, False
        hit = self._hit(found, local, blocks, request.num_tokens)
        choice = self._rules.choice
        chosen = choice.choose(hit) if choice is not None else all_of(hit)
        tracked.loading = (hit, chosen)
        tracked.is_beside = bool(chosen.blocks) and chosen.wait_s > self._rules.beside_s
        return max((local + chosen.blocks) * self._block_tokens - computed_tokens, 0), tracked.is_beside

    def _matched_groups(self, tracked: _Tracked, orders: GroupOrders, most: int) -> tuple[int, bool]:
        """Answer as `matched_tokens`: of several groups a boundary is loaded that suits all, or nothing."""
        surveyed = self._survey(self._prefix(tracked, most), most)
        leading = [next((at for at, here in enumerate(each) if not here), most) for each in surveyed.present]
        stays = [group.stays for group in self._groups.groups]
        tracked.groups = GroupsOfRequest([each if kept else 0 for each, kept in zip(leading, stays, strict=True)])
        local, skipped = tracked.local_blocks, orders.skipped
        found = surveyed.found(local, most, skipped)
        tracked.tiers, tracked.reached_tokens, tracked.stored_blocks = found.tiers, 0, found.blocks
        blocks = surveyed.reach(local, loadable_blocks(found, most, self._rules.beside_deadline_s), skipped)
        if blocks <= local or tracked.tried_at == tracked.request.num_preemptions:
            return 0, False
        hit = self._hit(found, local, blocks, tracked.request.num_tokens)
        choice = self._rules.choice
        chosen = choice.choose(hit, all_or_none=True) if choice is not None else all_of(hit)
        tracked.loading, tracked.is_beside = (hit, chosen), bool(chosen.blocks)
        return max((local + chosen.blocks) * self._block_tokens - tracked.local_tokens, 0), tracked.is_beside

    def admitted(self, request: Any, external_tokens: int, tables: Sequence[Sequence[int]]) -> None:
        """Note that vLLM gave `request` its pool blocks; `tables` are the block tables of its groups. The request's
        first step loads `external_tokens` tokens into them, or a load beside the engine's steps begins now.
        """
        tracked = self._track(request)
        tracked.external_tokens = external_tokens
        if not external_tokens:
            return
        tracked.tried_at = request.num_preemptions
        if tracked.groups is not None and self._group_orders is not None:
            last = (tracked.local_tokens + external_tokens) // self._block_tokens
            self._beside += self._group_orders.loads(
                request.request_id, self._prefix(tracked, last), tables, tracked.local_tokens, self._load_s(tracked)
            )
            for group in self._groups.groups:
                if not group.stays:
                    tracked.groups.stored[group.number] = last
            tracked.external_tokens, tracked.reached_tokens = 0, last * self._block_tokens
        elif tracked.is_beside:
            first = tracked.local_blocks
            last = first + external_tokens // self._block_tokens
            self._beside.append(self._load_order(tracked, first, last, tuple(tables[0][first:last])))
            tracked.external_tokens = 0
            tracked.reached_tokens = last * self._block_tokens

    def learn(self, report: StepReport) -> None:
        """Learn the cost of computing and loading from `report`, on a step's time and on the loads that ended in it."""
        choice = self._rules.choice
        for load in report.loads:
            tracked = self._requests.get(load.request_id)
            if tracked is None or tracked.loading is None:
                continue
            hit, chosen = tracked.loading
            tracked.loading = None
            if choice is not None:
                is_whole = tracked.groups is not None and load.blocks > 0
                choice.observe_load(hit, chosen, chosen.blocks if is_whole else load.blocks, load.seconds)
        if choice is not None and report.tokens:
            first = report.attended / report.tokens - report.tokens / 2
            choice.observe_compute(first, report.tokens, report.compute_s)

    def tiers(self, request_id: str, blocks: int) -> tuple[str, ...]:
        """Return the tiers of the first `blocks` blocks that the request `request_id` loads, for statistics."""
        tracked = self._requests.get(request_id)
        return tracked.tiers[tracked.local_blocks :][:blocks] if tracked else ()

    def stop(self) -> None:
        """Load and store nothing from now on. There is no way to start again."""
        self._loads = self._saves = False

    def finished(self, request: Any) -> None:
        """Note that `request` has ended and that vLLM frees its pool blocks after this call."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._ended.append(request.request_id)
        blocks, tokens = tracked.stored_blocks, request.num_output_tokens
        is_whole = getattr(request.status, "name", "") in _WHOLE
        if (
            self._on_answer is not None
            and self._saves
            and tracked.extras is not None
            and is_whole
            and blocks
            and tokens
        ):
            hints = getattr(request, "kv_hints", None)  # not every vLLM has it
            self._on_answer(EndedAnswer(self._prefix(tracked, blocks), blocks, tokens, hints))

    def orders(self, output: Any) -> StepOrders:
        """Return the orders for the workers around the step that `output`, a SchedulerOutput of vLLM, describes."""
        loads: list[LoadOrder] = []
        fills: list[tuple[_Tracked, int]] = []
        attended, step_tokens, decodes = 0.0, 0, 0
        for request_id, computed_tokens in _scheduled(output):
            tokens = output.num_scheduled_tokens[request_id]
            attended, step_tokens = attended + tokens * (computed_tokens + tokens / 2), step_tokens + tokens
            tracked = self._requests.get(request_id)
            decodes += tracked is not None and _decodes(tracked.request, computed_tokens)
            if tracked is None or tracked.extras is None:
                continue
            if tracked.external_tokens:
                first = (computed_tokens - tracked.external_tokens) // self._block_tokens
                last = computed_tokens // self._block_tokens
                block_ids = _block_ids(output, request_id)[first:last]
                loads.append(self._load_order(tracked, first, last, block_ids))
                tracked.external_tokens = 0
            fills.append((tracked, computed_tokens))
        # With several ranks the load of one may fail, and spoil what all of them compute in this step: a rank knows of
        # its own failures only. What rests on blocks that are being loaded is then ordered by the next step.
        loading = {block for order in loads for block in order.block_ids} if len(self._sessions) > 1 else set()
        saves: list[SaveOrder] = []
        released: list[int] = []
        for tracked, computed_tokens in fills:
            if tracked.groups is not None and self._group_orders is not None:
                released += self._group_orders.released(tracked.groups, computed_tokens)
            saves += self._save_orders(tracked, output, computed_tokens, loading)
        ended = [*self._ended, *self._preempted()]
        beside, self._ended, self._beside = tuple(self._beside), [], []
        return StepOrders(
            tuple(loads), tuple(saves), tuple(ended), beside, step_tokens, attended, decodes, tuple(released)
        )

    def _track(self, request: Any) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            described = self._describe(request)
            extras = described if isinstance(described, Extras) else None
            tracked = _Tracked(request, extras, preemptions=request.num_preemptions)
            if self._group_orders is not None:
                tracked.groups = GroupsOfRequest([0] * len(self._groups.groups))
            self._requests[request.request_id] = tracked
        return tracked

    def _lookup(self, prefix: RequestPrefix) -> Lookup:
        """Return the shortest answer of all ranks' shards."""
        shortest: Lookup | None = None
        for session in self._sessions:
            named = address(session, prefix)
            found = Lookup(reason=REASON_NO_DAEMON)
            if named is not None:
                # A closed session, a request the daemon refuses: nothing is there.
                with suppress(KVStoreError), traced(prefix.trace):
                    found = session.lookup(**named, deadline_s=self._lookup_deadline_s)
            if shortest is None or found.blocks < shortest.blocks:
                shortest = found
            if not shortest.blocks:
                break
        return shortest or Lookup()

    def _survey(self, prefix: RequestPrefix, most: int) -> Survey:
        """Return what all ranks' shards have of each group."""
        answers = []
        for session in self._sessions:
            of_shard = [Lookup() for _ in self._groups.groups]
            for group in self._groups.groups:
                named = address(session, prefix, group=group.number)
                if named is not None:
                    with suppress(KVStoreError), traced(prefix.trace):  # as in `_lookup`
                        of_shard[group.number] = session.lookup(**named, deadline_s=self._lookup_deadline_s)
                if group.stays and not of_shard[group.number].blocks:
                    break
            answers.append(of_shard)
        return survey(self._groups, answers or [[Lookup() for _ in self._groups.groups]], most)

    def _hit(self, found: Lookup, first: int, last: int, tokens: int) -> Hit:
        size = self._block_tokens
        return hit_of(
            found, first, last, block_tokens=size, block_bytes=self._rules.block_bytes, tokens=tokens, held=first * size
        )

    def _load_order(self, tracked: _Tracked, first: int, last: int, block_ids: tuple[int, ...]) -> LoadOrder:
        prefix, deadline_s = self._prefix(tracked, last), self._load_s(tracked)
        return LoadOrder(tracked.request.request_id, prefix, first, block_ids, deadline_s)

    def _load_s(self, tracked: _Tracked) -> float:
        rules = self._rules
        deadline_s = rules.beside_deadline_s if tracked.is_beside else rules.deadline_s
        return deadline_s if tracked.loading is None else min(deadline_s, tracked.loading[1].deadline_s)

    def _save_orders(
        self, tracked: _Tracked, output: Any, computed_tokens: int, loading: set[Place]
    ) -> Sequence[SaveOrder]:
        if not self._saves:
            return ()
        if computed_tokens < tracked.reached_tokens:  # a load failed; what was computed on top is computed again
            tracked.stored_blocks = min(tracked.stored_blocks, computed_tokens // self._block_tokens)
            if tracked.groups is not None:
                tracked.groups.taken_back(computed_tokens // self._block_tokens)
        tracked.reached_tokens = computed_tokens
        request_id = tracked.request.request_id
        guessed = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        filled_tokens = computed_tokens + output.num_scheduled_tokens[request_id] - guessed
        end = min(filled_tokens, len(tracked.request.all_token_ids))
        full = end // self._block_tokens
        if tracked.groups is not None and self._group_orders is not None:
            if full <= min(tracked.groups.stored):
                return ()
            tracked.stored_blocks = max(tracked.stored_blocks, full)
            state = output.kv_connector_block_state
            tables, offers = state.get_block_ids(request_id), state.boundary_state_offloads.get(request_id, ())
            prefix_of = partial(self._prefix, tracked)
            return list(self._group_orders.saves(request_id, tracked.groups, end, tables, offers, prefix_of))
        if full <= tracked.stored_blocks:
            return ()
        block_ids = _block_ids(output, request_id)[:full]
        if not loading.isdisjoint(block_ids):
            return ()
        first, tracked.stored_blocks = tracked.stored_blocks, full
        return (SaveOrder(request_id, self._prefix(tracked, full), first, block_ids),)

    def _preempted(self) -> Iterator[str]:
        for request_id, tracked in self._requests.items():
            if tracked.request.num_preemptions != tracked.preemptions:
                tracked.preemptions = tracked.request.num_preemptions
                yield request_id

    def _prefix(self, tracked: _Tracked, blocks: int) -> RequestPrefix:
        assert tracked.extras is not None
        tokens = tracked.request.all_token_ids[: blocks * self._block_tokens]
        headers = getattr(tracked.request, "trace_headers", None) or {}
        digests = tracked.extras.digests(blocks, self._block_tokens)
        return RequestPrefix(pack_tokens(tokens), digests, headers.get("traceparent", ""))


def _scheduled(output: Any) -> Iterator[tuple[str, int]]:
    """Yield each scheduled request and how many of its tokens were computed (or are loaded) before this step's own."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def _decodes(request: Any, computed_tokens: int) -> bool:
    """Return whether a step behind `computed_tokens` tokens continues the answer."""
    prompt_tokens: int = request.num_tokens - request.num_output_tokens
    return computed_tokens >= prompt_tokens


def _block_ids(output: Any, request_id: str) -> tuple[int, ...]:
    """Return the pool blocks of a request in this step, of an engine with one group."""
    groups = output.kv_connector_block_state.get_block_ids(request_id)
    return tuple(groups[0])
