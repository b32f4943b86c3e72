"""Windowed layers in the batch engine: windows restored in vain, and prompts that share a prefix without windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.memory_session import MemoryLease, MemorySession
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, twin_pool

_WINDOW = 130
_PROMPT: list[int] = np.random.default_rng(1).integers(0, 64, 1000).tolist()


class _Flawed(MemorySession):
    """A session whose leases of windowed layers are `flawed`: ended before they are copied, or of other sizes."""

    flawed = ""

    def get(self, *arguments: Any, group: int | None = None, **named: Any) -> MemoryLease:
        lease = super().get(*arguments, group=group, **named)
        if group and self.flawed:
            lease.valid = self.flawed != "ended"
            if self.flawed == "short":
                lease.payloads[-1] = lease.payloads[-1][:-1]
        return lease


def _engine(session: MemorySession | None, *, blocks: int = 200, windows: int = 100, **settings: Any) -> BatchEngine:
    compute = TwinCompute(twin_pool(blocks, window=(_WINDOW, windows)), on_step=StepClock().step)
    return BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(max_queue_s=1e9, swap_bytes=0, **settings),
        sessions=None if session is None else lambda tenant: session,
        costs=assume(LearnedCosts()),
        clock=StepClock(),
    )


def _answer(engine: BatchEngine, prompt: list[int]) -> None:
    outcome = Outcome()
    engine.add(request("a", prompt))
    run(engine, outcome)
    assert outcome.tokens["a", 0] == answer_alone(prompt, 8)


@pytest.mark.parametrize("flaw", ["ended", "short"])
def test_a_window_that_cannot_be_restored_leaves_the_one_that_is_there(flaw: str) -> None:
    session = _Flawed(twin_pool(4).payload_bytes(4), window_tokens=_WINDOW)
    engine = _engine(session)
    _answer(engine, _PROMPT)
    engine.close()
    engine = _engine(session)
    _answer(engine, _PROMPT[:450])
    session.flawed = flaw
    _answer(engine, _PROMPT)
    engine.close()
    assert all(lease.released for lease in session.leases)


def test_prompts_that_share_a_prefix_without_its_windows_are_answered_where_blocks_are_short() -> None:
    engine, outcome = _engine(None, blocks=100, windows=30), Outcome()
    _answer(engine, _PROMPT[:960])
    _answer(engine, _PROMPT[::-1][:560])  # takes the place of its windows
    prompts = {str(number): [*_PROMPT[:960], number] for number in range(3)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    run(engine, outcome)
    for name, prompt in prompts.items():
        assert outcome.tokens[name, 0] == answer_alone(prompt, 8)
    engine.close()
