"""The contract that every connector must keep, as tests. Subclass `ConnectorContract` and name your engine.

Owns the obligations, one test each: right answers despite failures of daemon, disk, leases and other engines, and hits
where there must be hits. Never knows an engine. Each test has a daemon of its own; the reference for an answer is the
same engine without a store.
"""

from __future__ import annotations

import os
import time
import unittest
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from kvstore_client.testing.daemon import DaemonProcess, eventually
from kvstore_client.testing.pressure import filled
from kvstore_client.testing.process import EngineProcess
from kvstore_client.testing.setting import EngineSetting, EngineUnderTest, PromptResult
from kvstore_proto.fingerprint import LayerGroup

PROMPT_BLOCKS = 6
DAMAGED_BLOCK = 2
OTHER_GID = 65534  # nogroup, on every Linux
TWO_TENANTS = f'[[tenant]]\nname = "stranger"\ngids = [{OTHER_GID}]\n'
LEASE_TTL_MS = 300
STALL_S = 20  # of a read
_TRUTHS: dict[tuple[type, str, tuple[int, ...]], PromptResult] = {}


class ConnectorContract:
    """A suite of tests that every connector must pass. Subclass it, and name your engine in `engine`
    ("module:function"), or define `open_engine` for an engine that has processes of its own.

    `block_tokens` is the number of tokens of the engine's stored blocks. Token ids 1 to `vocabulary` - 1 may be used in
    prompts. `fills_gaps` says that the engine computes a block that cannot be loaded, and uses the blocks behind it.
    """

    engine: ClassVar[str] = ""
    block_tokens: ClassVar[int] = 64
    vocabulary: ClassVar[int] = 300
    fills_gaps: ClassVar[bool] = False

    def open_engine(self, setting: EngineSetting) -> EngineUnderTest:
        """Start the engine under test with `setting`, and return it. Override it if the engine starts its own
        processes.
        """
        if not self.engine:
            raise TypeError("a subclass of ConnectorContract must name `engine` or define `open_engine`")
        return EngineProcess(self.engine, setting)

    # Hits

    def test_a_second_engine_restores_what_the_first_stored(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as first, self.opened(daemon) as second:
            first.store(tokens)
            self.must_be_restored_whole(second, tokens)
            assert eventually(lambda: daemon.status().leases == 0), "a lease was not given back"

    def test_a_prompt_that_parts_from_a_stored_one_restores_what_they_share(self) -> None:
        tokens = self.prompt(1)
        other = [*tokens[: 3 * self.block_tokens + 5], *self.prompt(2)[3 * self.block_tokens + 5 :]]
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            engine.store(tokens)
            self.must_be_restored_whole(engine, tokens)
            self.must_answer_right(engine, other, most=3 * self.block_tokens)
            assert self.restores(engine, other), "nothing was restored of a shared prefix"

    def test_a_prompt_of_whole_blocks_leaves_its_last_token_to_compute(self) -> None:
        tokens = self.prompt(1)[: PROMPT_BLOCKS * self.block_tokens]
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            engine.store(tokens)
            self.must_answer_right(engine, tokens, most=len(tokens) - 1)

    def test_short_prompts_are_answered(self) -> None:
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            for length in (1, self.block_tokens - 1, self.block_tokens + 1):
                tokens = self.prompt(length)[:length]
                engine.store(tokens)
                self.must_answer_right(engine, tokens, most=length - 1)

    def test_equal_blocks_are_stored_once(self) -> None:
        tokens = self.prompt(1)
        longer = [*tokens, *self.prompt(2)[: self.block_tokens]]
        with DaemonProcess() as daemon, self.opened(daemon) as first, self.opened(daemon) as second:
            first.store(tokens)
            once = daemon.counter("stored_blocks")
            second.store(tokens)
            assert daemon.counter("stored_blocks") == once > 0
            second.store(longer)
            added = len(longer) // self.block_tokens - PROMPT_BLOCKS
            assert daemon.counter("stored_blocks") == once + added * (once // PROMPT_BLOCKS)  # of each layer group
            self.must_be_restored_whole(first, longer)

    # What must never be shared

    def test_another_model_gets_nothing(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as engine, self.opened(daemon, "second") as other:
            engine.store(tokens)
            self.must_answer_right(other, tokens, most=0, model="second")
            other.store(tokens)
            self.must_be_restored_whole(other, tokens, model="second")
            self.must_be_restored_whole(engine, tokens)

    def test_another_tenant_gets_nothing(self) -> None:
        if os.getuid() != 0 or not self.engine:
            raise unittest.SkipTest("needs root, to run an engine in another group")
        tokens = self.prompt(1)
        with DaemonProcess(config=TWO_TENANTS) as daemon:
            stranger = EngineProcess(self.engine, EngineSetting(daemon.socket_dir), gid=OTHER_GID)
            with self.opened(daemon) as engine, _closing(stranger):
                engine.store(tokens)
                before = daemon.counter("stored_blocks")
                self.must_answer_right(stranger, tokens, most=0)
                stranger.store(tokens)
                assert daemon.counter("stored_blocks") > before, "the other tenant stores its own"
                self.must_be_restored_whole(stranger, tokens)

    # Engines that die

    def test_an_engine_that_dies_with_a_lease_leaves_nothing_behind(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as victim, self.opened(daemon) as other:
            self._begin_to_read(daemon, victim, tokens)
            assert daemon.status().leases > 0
            victim.kill()
            assert eventually(lambda: daemon.status().leases == 0)
            self.must_be_restored_whole(other, tokens)

    def test_an_engine_that_dies_before_it_stores_leaves_nothing_behind(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as victim, self.opened(daemon) as other:
            victim.pause_at("writing")
            assert victim.begin("store", tokens), "the prompt was stored without a pause"
            clients = daemon.status().clients
            victim.kill()  # its blocks are in its staging, and the daemon was not sent their keys
            assert eventually(lambda: daemon.status().clients < clients)
            self.must_answer_right(other, tokens, most=0)
            other.store(tokens)
            self.must_be_restored_whole(other, tokens)

    # Leases that end too early

    def test_a_lease_that_expires_while_its_blocks_are_copied_is_not_trusted(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess(f"limits.lease_ttl_ms={LEASE_TTL_MS}") as daemon, self.opened(daemon) as engine:
            self._begin_to_read(daemon, engine, tokens)
            eventually(lambda: daemon.counter("expired_leases") > 0)  # unless the connector renews it meanwhile
            self._must_be_right(engine.go_on(), tokens)
            self.must_answer_right(engine, tokens)

    def test_a_daemon_that_dies_while_blocks_are_copied_costs_nothing_but_time(self) -> None:
        with self._copying() as (daemon, engine, tokens):
            daemon.kill()
            self._must_be_right(engine.go_on(), tokens)

    def test_a_daemon_that_stops_while_blocks_are_copied_costs_nothing_but_time(self) -> None:
        with self._copying() as (daemon, engine, tokens), daemon.frozen():
            self._must_be_right(engine.go_on(), tokens)
            self.must_answer_right(engine, tokens)

    def test_blocks_that_are_dropped_while_they_are_copied_cost_nothing_but_time(self) -> None:
        with self._copying() as (daemon, engine, tokens):
            daemon.flush()
            daemon.drop_all()
            self._must_be_right(engine.go_on(), tokens)
            self.must_answer_right(engine, tokens)

    # Loads that do not come

    def test_reads_that_stall_are_given_up(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess(failpoints=f"nvme.read=delay:{STALL_S}") as daemon, self.opened(daemon) as engine:
            engine.store(tokens)
            daemon.flush()
            assert eventually(lambda: daemon.drop_host().kept_blocks == 0)
            self.computed(tokens)
            begin = time.monotonic()
            self.must_answer_right(engine, tokens, most=0)
            took_s = time.monotonic() - begin
            daemon.kill()
        assert took_s < STALL_S, f"the engine waited {took_s:.0f} s for blocks that did not come"

    # Daemons that die, stop or are not there

    def test_after_a_crash_of_the_daemon_what_was_durable_is_restored(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            engine.store(tokens)
            daemon.flush()
            daemon.kill()
            self.must_answer_right(engine, tokens, most=0)
            engine.store(self.prompt(2))
            daemon.start()
            self.must_be_restored_whole(engine, tokens)

    def test_a_stopped_daemon_never_makes_an_engine_hang(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            engine.store(tokens)
            with daemon.frozen():
                self.must_answer_right(engine, tokens)
                engine.store(self.prompt(2))
                self.must_answer_right(engine, self.prompt(2))
                with self.opened(daemon) as latecomer:
                    self.must_answer_right(latecomer, tokens)
            self.must_be_restored_whole(engine, tokens)

    def test_without_a_daemon_the_engine_works_and_finds_it_when_it_comes(self) -> None:
        tokens = self.prompt(1)
        daemon = DaemonProcess()
        with self.opened(daemon) as engine:
            engine.store(tokens)
            self.must_answer_right(engine, tokens, most=0)
            with daemon:
                assert eventually(lambda: self._stores(engine, daemon, tokens))
                self.must_be_restored_whole(engine, tokens)

    # A store that is full or damaged

    def test_a_store_without_room_costs_nothing_but_hits(self) -> None:
        tokens = self.prompt(1)
        with DaemonProcess("nvme.enabled=false") as daemon, self.opened(daemon) as engine:
            with filled(daemon.socket_dir):
                engine.store(tokens)
                self.must_answer_right(engine, tokens)
            assert eventually(lambda: self._stores(engine, daemon, tokens)), "room again, and nothing is stored"
            self.must_be_restored_whole(engine, tokens)

    def test_a_gap_that_corruption_on_disk_makes_ends_the_prefix(self) -> None:
        """A damaged block ends the restored prefix. In an engine that fills gaps, only the damaged block is not
        restored.
        """
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            engine.store(tokens)
            daemon.flush()
            assert eventually(lambda: daemon.drop_host().kept_blocks == 0)
            assert daemon.damage_on_disk(DAMAGED_BLOCK), "no block of that depth is on NVMe"
            groups = daemon.fingerprint().groups
            blocks = PROMPT_BLOCKS - 1 if self.fills_gaps else _usable(groups, DAMAGED_BLOCK, self.block_tokens)
            self.must_answer_right(engine, tokens, most=blocks * self.block_tokens)
            for _ in groups:  # damage is found when it is read, perhaps of one group after the other
                engine.store(tokens)
                self.must_answer_right(engine, tokens)
            self.must_be_restored_whole(engine, tokens)

    def test_a_block_that_one_layer_group_lacks_ends_the_hit_where_that_group_does(self) -> None:
        """Check that an engine whose model has several layer groups, or a group that is not full attention, resumes at
        the longest boundary where every group has the blocks that it needs. It must request no other blocks.
        """
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            engine.store(self.prompt(1))
            groups = daemon.fingerprint().groups
            if [group.kind for group in groups] == ["full"] or self.fills_gaps:
                return  # as the case before
            for group in groups:
                for damaged in (PROMPT_BLOCKS - 2, PROMPT_BLOCKS - 1):
                    tokens = self.prompt(100 + 2 * group.group_id + damaged % 2)
                    engine.store(tokens)
                    daemon.flush()
                    assert eventually(lambda: daemon.drop_host().kept_blocks == 0)
                    assert daemon.damage_on_disk(damaged, group.group_id)
                    expected = _usable([group], damaged, self.block_tokens) * self.block_tokens
                    self.must_answer_right(engine, tokens, most=expected)
                    what = f"layer group {group.group_id} ({group.kind}) lacks block {damaged}"
                    restored = 0
                    for _ in range(len(groups)):  # a damaged block is found when it is read
                        restored = engine.restore(tokens).tokens
                        if restored == expected:
                            break
                    assert restored == expected, f"{what}: {restored} of {expected} tokens are restored"

    # How a case is written

    def prompt(self, number: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
        """Return the token ids of a prompt: `blocks` whole blocks, and half a block. Prompts of different `number`
        share no block.
        """
        length = blocks * self.block_tokens + self.block_tokens // 2
        return [int(token) for token in np.random.default_rng([number, 77]).integers(1, self.vocabulary, length)]

    @contextmanager
    def opened(self, daemon: DaemonProcess, model: str = "first") -> Iterator[EngineUnderTest]:
        with _closing(self.open_engine(EngineSetting(daemon.socket_dir, model))) as engine:
            yield engine

    def computed(self, tokens: list[int], model: str = "first") -> PromptResult:
        """Return the engine's answer to the prompt `tokens` without a store, which is the right answer. It is computed
        once for each prompt.
        """
        question = (type(self), model, tuple(tokens))
        if question not in _TRUTHS:
            with _closing(self.open_engine(EngineSetting(None, model))) as engine:
                _TRUTHS[question] = engine.restore(tokens)
        return _TRUTHS[question]

    def must_answer_right(
        self, engine: EngineUnderTest, tokens: list[int], *, most: int | None = None, model: str = "first"
    ) -> None:
        """Check that `engine` answers the prompt `tokens` as it does without a store, and that at most `most` tokens of
        the prompt were restored. None for `most` allows all tokens but the last.
        """
        self._must_be_right(engine.restore(tokens), tokens, most=most, model=model)

    def must_be_restored_whole(self, engine: EngineUnderTest, tokens: list[int], *, model: str = "first") -> None:
        """Check that `engine` soon restores every full block of the prompt `tokens` from the store, and answers as it
        does without a store. An engine always computes the last token, so a block that ends with it does not count.
        """
        usable = (len(tokens) - 1) // self.block_tokens * self.block_tokens
        best = PromptResult(0, None)

        def is_whole() -> bool:
            nonlocal best
            best = engine.restore(tokens)
            return best.tokens >= usable

        assert eventually(is_whole), f"{best.tokens} of {usable} tokens are restored"
        self._must_be_right(best, tokens, model=model)

    @contextmanager
    def _copying(self) -> Iterator[tuple[DaemonProcess, EngineUnderTest, list[int]]]:
        """Yield an engine that is about to read the first leased block of a prompt that it stored."""
        tokens = self.prompt(1)
        with DaemonProcess() as daemon, self.opened(daemon) as engine:
            self._begin_to_read(daemon, engine, tokens)
            yield daemon, engine, tokens

    def _begin_to_read(self, daemon: DaemonProcess, engine: EngineUnderTest, tokens: list[int]) -> None:
        """Have `engine` store the prompt `tokens` and begin to restore it, and leave it before its first leased block.
        On a busy machine a deadline of its connector may pass first, which costs it a miss: then it is asked again.
        """
        assert eventually(lambda: self._stores(engine, daemon, tokens)), "the prompt is not restored"
        engine.pause_at("reading")
        assert eventually(lambda: engine.begin("restore", tokens)), "the prompt is restored without reading a lease"

    def restores(self, engine: EngineUnderTest, tokens: list[int]) -> bool:
        return eventually(lambda: engine.restore(tokens).tokens > 0)

    def _stores(self, engine: EngineUnderTest, daemon: DaemonProcess, tokens: list[int]) -> bool:
        engine.store(tokens)
        return daemon.counter("stored_blocks") > 0 and engine.restore(tokens).tokens > 0

    def _must_be_right(
        self, answer: PromptResult | None, tokens: list[int], *, most: int | None = None, model: str = "first"
    ) -> None:
        assert answer is not None, "restore returned nothing"
        truth = self.computed(tokens, model)
        assert truth.tokens == 0, "without a store, an engine cannot restore"
        limit = len(tokens) - 1 if most is None else most
        assert answer.tokens <= limit, f"{answer.tokens} tokens restored, at most {limit} could be had"
        assert answer.output == truth.output, f"a wrong answer with {answer.tokens} tokens restored"


def _usable(groups: Sequence[LayerGroup], damaged: int, block_tokens: int) -> int:
    """Return the longest boundary, in blocks, at which no group needs the block `damaged`."""
    return max(
        boundary
        for boundary in range(PROMPT_BLOCKS + 1)
        if not any(damaged in group.needed_blocks(boundary, block_tokens) for group in groups)
    )


@contextmanager
def _closing(engine: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """Close the engine at the end of the block; after a failure, kill it."""
    try:
        yield engine
    except BaseException:
        engine.kill()
        raise
    engine.close()
