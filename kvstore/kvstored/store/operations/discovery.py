"""Discovery: blocks that a key-addressed tier has and the index does not know, since another process stored them.

The module owns the questions to those tiers: whether one pays, which are under way, and the use of the answers. A
question is waited for until its deadline and no longer; a later answer still enters the index, for the next request. A
found block is believed only when its bytes have been read and verified. Invariants: only names of the asking tenant are
asked for, so no tenant learns what another one has stored; a block is asked for once at a time; a tier that owes
`MOST_OWED` answers, or is shed by its breaker, is not asked, and one that owes an answer for too long is not waited
for; an answer that a deletion overtook is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvstore_proto.arena import slot_bytes
from kvstore_proto.identity import KEY_BYTES, NO_PARENT, split_keys
from kvstore_tiers.base import Outcome, OutcomeKind
from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client
from kvstored.store.remote import DEADLINE_MS, AnswerTimes, RemoteValue, RemoteVerdict

MOST_OWED = 16  # answers of one tier; their questions wait in its queue
MOST_ASKED = 4096  # blocks of one question
LATE_S = 10.0  # an answer that comes later than this is of no use


class Question:
    """A question to remote tiers, which of the blocks `missing` of a chain they have. `parents` has, for each of these
    blocks, the key of the block before it. `entered` is set when the blocks found before the deadline are in the block
    index."""

    def __init__(
        self, client: Client, missing: Sequence[bytes], parents: Sequence[bytes], group: int, deletions: int
    ) -> None:
        self.client, self.missing, self.parents, self.group = client, missing, parents, group
        self.deletions = deletions  # before it was asked
        self.entered = asyncio.Event()
        self.is_late = False  # some tier had not answered by then
        self.pays = False  # to be waited for
        self.found: set[int] = set()  # positions in `missing`
        self.found_bytes = 0

    @property
    def absent(self) -> bytes | None:
        """The first missing block that was not found; None if all were."""
        return next((key for at, key in enumerate(self.missing) if at not in self.found), None)


class Discovery:
    """The component that asks a store's remote (key-addressed) tiers for blocks that the block index does not have.
    `value` estimates whether a question pays; `times` maps a tier's position to how long the tier's answers took."""

    def __init__(self, store: Store) -> None:
        self._residency, self._tiers, self._rooms = store.residency, store.keyed, store.rooms
        self._promoter, self._absences = store.promoter, store.absences
        self.value = RemoteValue(compute=store.compute)
        self._completions, self._clock, self._counters = store.completions, store.clock, store.counters
        self.times = {position: AnswerTimes() for position in self._tiers}
        self._owed: dict[int, deque[float]] = {at: deque() for at in self._tiers}  # asked when, oldest first
        self._asked: dict[tuple[int, bytes], Question] = {}  # by tenant and key
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_possible(self) -> bool:
        """True if the store has a remote (key-addressed) tier to ask."""
        return bool(self._tiers)

    def ask(
        self, client: Client, keys: bytes, known: int, group: int, limit_ms: int, parent: bytes = NO_PARENT
    ) -> Question | None:
        """Ask the remote tiers for the blocks of a chain after its first `known` blocks, if that pays. `keys` are
        packed, 16 bytes each; `parent` is the key of the block before the first key; `group` is the layer group;
        `limit_ms` is how long the caller can wait. Return the question when waiting for its answer pays, else None.
        """
        blocks, tokens = len(keys) // KEY_BYTES - known, client.fingerprint.block_tokens
        if not blocks or not self.is_possible:
            return None
        if self.value.declines(client.tenant_id, blocks * tokens):
            self._counters.add("discovery_declined")
            return None
        positions = [position for position in self._tiers if self._may_be_asked(position, client)]
        if not positions:
            return None
        tenant, times = client.tenant_id, self.times[positions[0]]
        first = keys[known * KEY_BYTES : (known + 1) * KEY_BYTES]
        if self._absences.covers(tenant, first, self._clock.monotonic_ns()):
            self._counters.add("discovery_known_absent")
            return None
        nbytes = round(self.value.expected_blocks(tenant, blocks) * self.value.block_bytes(tenant))
        load_us = self._promoter.load_us(positions[0], nbytes) if nbytes else 0.0
        verdict = self.value.judge(tenant, blocks, tokens, load_us, times)
        if verdict is RemoteVerdict.NO:
            self._counters.add("discovery_declined")
            return None
        question = self._asked.get((tenant, first))
        if question is None and self._residency.find(tenant, first) < 0:
            chain = [parent, *split_keys(keys)]
            end = known + min(blocks, MOST_ASKED)
            question = self._begin(client, chain[known + 1 : end + 1], chain[known:end], group, positions)
        is_quick = limit_ms >= times.expected_s * 1000 and not self._is_behind(positions[0])
        if question is None or verdict is not RemoteVerdict.WAIT or not is_quick:
            return None
        question.pays = True
        return question

    def under_way(self, client: Client, first: bytes) -> Question | None:
        """Return the question about the block `first` and those after it that has no answer yet and that `ask` has
        returned; None if there is none."""
        question = self._asked.get((client.tenant_id, first))
        return question if question is not None and question.pays else None

    async def wait(self, question: Question, limit_ms: int) -> None:
        """Wait until `question` is answered, for `limit_ms` milliseconds at most. Blocks that were found in time are
        then in the block index.
        """
        with suppress(TimeoutError):  # `wait_for` of Python 3.11 loses a cancellation that comes with the answer
            async with asyncio.timeout(min(limit_ms, DEADLINE_MS) / 1000):
                await question.entered.wait()
        if question.is_late or not question.entered.is_set():
            self._counters.add("discovery_timeouts")

    def _may_be_asked(self, position: int, client: Client) -> bool:
        if len(self._owed[position]) >= MOST_OWED or not self._promoter.reads_from(position):
            return False
        tier = self._tiers[position]
        return tier.is_ready and not tier.refuses(client.tenant.digest)

    def _is_behind(self, position: int) -> bool:
        """Return whether a tier owes a late answer: no request waits for another answer of it meanwhile."""
        owed = self._owed[position]
        return bool(owed) and asyncio.get_running_loop().time() - owed[0] >= self.times[position].deadline_s

    # Asking

    def _begin(
        self, client: Client, missing: Sequence[bytes], parents: Sequence[bytes], group: int, positions: Sequence[int]
    ) -> Question:
        question = Question(client, missing, parents, group, self._residency.deletions)
        for key in question.missing:
            self._asked[client.tenant_id, key] = question
        self._counters.add("discovery_questions", len(question.missing))
        answers = {position: self._ask_tier(position, question) for position in positions}
        task = asyncio.get_running_loop().create_task(self._answer(question, answers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return question

    async def _answer(self, question: Question, answers: Mapping[int, asyncio.Future[list[int]]]) -> None:
        """Enter found blocks: at the deadline the answers that have come, later the rest."""
        tenant = question.client.tenant_id
        try:
            deadline_s = max(self.times[position].deadline_s for position in answers)
            _, late = await asyncio.wait(answers.values(), timeout=deadline_s)
            await self._enter_found(question, answers)
            question.is_late = bool(late)
            question.entered.set()
            if late:
                _, late = await asyncio.wait(late, timeout=LATE_S)
                await self._enter_found(question, answers)
            if any(answer.done() and _failed(answer) for answer in answers.values()):
                return  # that a store was away says nothing of what it has
            found, absent = len(question.found), question.absent
            self.value.answered(tenant, len(question.missing), found, question.found_bytes)
            self._counters.add("discovered_blocks", found)
            if not late and absent is not None and self._residency.find_any(tenant, absent) < 0:
                self._absences.note(tenant, absent, self._clock.monotonic_ns())
        finally:
            question.entered.set()
            for key in question.missing:
                self._asked.pop((tenant, key), None)

    def _ask_tier(self, position: int, question: Question) -> asyncio.Future[list[int]]:
        loop, breaker = asyncio.get_running_loop(), self._promoter.breaker_of(position)
        began_s, number = loop.time(), breaker.began() if breaker is not None else 0
        self._owed[position].append(began_s)

        def heard(answer: asyncio.Future[list[int]]) -> None:
            self._owed[position].remove(began_s)
            if answer.cancelled() or _failed(answer):
                if breaker is not None:
                    breaker.ended(number, "read", Outcome(OutcomeKind.FAILED, message="a question failed"))
                return
            self.times[position].add(loop.time() - began_s)
            self._promoter.answered(position, loop.time() - began_s)
            if breaker is not None:
                breaker.forgo(number)

        digest = question.client.tenant.digest
        answer: asyncio.Future[list[int]] = self._completions.outcome_of(
            partial(self._tiers[position].find, digest, question.missing)
        )
        answer.add_done_callback(heard)
        return answer

    # What was found

    async def _enter_found(self, question: Question, answers: Mapping[int, asyncio.Future[list[int]]]) -> None:
        """Enter the blocks that are of use, with the answers that have come: up to the first gap in the chain, or all
        of them where a block can be used without the one before it.
        """
        residency, tenant = self._residency, question.client.tenant_id
        needs_parents = question.client.needs_parents(question.group)
        for at, (key, parent) in enumerate(zip(question.missing, question.parents, strict=True)):
            if residency.deletions != question.deletions:
                return
            if at in question.found:
                continue
            if residency.find(tenant, key) < 0:  # else another request found or stored it meanwhile
                if needs_parents and parent != NO_PARENT and residency.find(tenant, parent) < 0:
                    return
                come = ((position, answer.result()[at]) for position, answer in answers.items() if answer.done())
                position, payload_bytes = next((each for each in come if each[1] >= 0), (-1, -1))
                if position < 0 or not await self._enter(question, key, parent, position, payload_bytes):
                    if needs_parents:
                        return
                    continue
                question.found_bytes += payload_bytes
            question.found.add(at)

    async def _enter(self, question: Question, key: bytes, parent: bytes, position: int, payload_bytes: int) -> bool:
        client = question.client
        residency, tenant, tier = self._residency, client.tenant_id, self._tiers[position]
        slot = await self._rooms[position].allocate(slot_bytes(payload_bytes), tenant, is_patient=False)
        if slot is None:
            return False
        above = residency.find_any(tenant, parent) if parent != NO_PARENT else -1
        is_orphan = parent != NO_PARENT and above < 0 and client.needs_parents(question.group)
        is_stale = residency.deletions != question.deletions or is_orphan
        if is_stale or residency.find_any(tenant, key) >= 0:
            tier.free(slot)  # while room was made: it is stored now, or what it continues has gone
            return residency.find(tenant, key) >= 0
        tier.adopt(slot, client.tenant.digest, key)
        now_ns = self._clock.monotonic_ns()
        row = residency.insert(
            tenant, key, parent, fingerprint_id=client.fingerprint_id, group=question.group,
            depth=residency.depth(above) + 1 if above >= 0 else 0, payload_bytes=payload_bytes, now_ns=now_ns,
        )  # fmt: skip
        residency.attach(row, position, slot, now_ns)
        return True


def _failed(answer: asyncio.Future[list[int]]) -> bool:
    from kvstore_tiers.keyed import UNKNOWN  # loaded already, by the tier that was asked

    return answer.result()[:1] == [UNKNOWN]
