"""For any requests in any order, each answer is what its request alone would have got."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, check, request, run
from tests.reference.block_invariants import check_blocks
from tests.reference.examples import examples
from tests.reference.memory_session import MemorySession
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, twin_pool

# A prompt is a beginning that others share, some whole blocks of it, and an end of its own.
_PROMPTS = st.builds(
    lambda family, blocks, rest, own: [(family * 17 + k * k) % 64 for k in range(16 * blocks + rest)] + own,
    st.integers(0, 2),
    st.integers(0, 9),
    st.integers(0, 15),
    st.lists(st.integers(0, 63), max_size=12),
).map(lambda tokens: tokens or [1])
_REQUESTS = st.fixed_dictionaries(
    {
        "tokens": _PROMPTS,
        "max_tokens": st.integers(1, 70),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "tenant": st.sampled_from(["", "", "other"]),
        "priority": st.integers(0, 2),
        "store": st.booleans(),
    }
)
_MISCHIEF = ("connected", "degraded", "failing", "promoting", "losing", "evicting windows")
_ADD = st.tuples(st.just("add"), _REQUESTS)
_STEP = st.tuples(st.just("step"), st.integers(1, 25))
_CANCEL = st.tuples(st.just("cancel"), st.integers(0, 30))
_DAEMON = st.tuples(st.just("daemon"), st.sampled_from(_MISCHIEF))


def _engine(
    session: MemorySession,
    blocks: int,
    swap_blocks: int,
    policy: str,
    patience: float,
    window: tuple[int, int] = (0, 0),
) -> BatchEngine:
    compute = TwinCompute(twin_pool(blocks, window=window), max_sequences=8, on_step=StepClock().step)
    costs = LearnedCosts()
    assume(costs, [patience, patience, 0.0])
    return BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(
            policy=policy,  # type: ignore[arg-type]
            max_running=8,
            prefill_tokens=64,
            swap_bytes=swap_blocks * compute.pool.payload_bytes(1),
            max_queue_s=1e9,
        ),
        sessions=lambda tenant: None if tenant else session,
        costs=costs,
        clock=StepClock(),
    )


def _misbehave(session: MemorySession, how: str) -> None:
    session.state = "degraded" if how == "degraded" else "connected"
    session.fail_with = ConnectionResetError("gone") if how == "failing" else None
    session.mapped_blocks = 1 if how == "promoting" else None
    session.leases_stay_valid = how != "losing"
    if how == "evicting windows":
        for key in list(session.windows)[::3]:
            del session.windows[key]


@settings(max_examples=examples(40))
@given(
    actions=st.lists(st.one_of(_ADD, _ADD, _STEP, _CANCEL, _DAEMON), min_size=3, max_size=40),
    blocks=st.integers(16, 60),
    swap_blocks=st.sampled_from([0, 12, 1000]),
    policy=st.sampled_from(["fcfs", "shortest", "priority"]),
    patience=st.sampled_from([1e-6, 10.0]),
    window=st.none() | st.tuples(st.integers(2, 90), st.integers(0, 30)),
)
def test_every_answer_is_what_its_request_alone_would_have_got(
    actions: list[tuple[str, Any]],
    blocks: int,
    swap_blocks: int,
    policy: str,
    patience: float,
    window: tuple[int, int] | None,
) -> None:
    """`window`: the tokens that a second layer sees, and how many blocks more it has than one sequence needs."""
    session = MemorySession(twin_pool(4).payload_bytes(4))
    own = (0, 0)
    if window is not None:
        session.window_tokens = window[0]
        own = window[0], min(blocks + 1, -(-window[0] // 16) + 4 + 3 + window[1])
    engine = _engine(session, blocks, swap_blocks, policy, patience, own)
    outcome, asked, cancelled = Outcome(), list[dict[str, Any]](), set[str]()
    for kind, what in actions:
        if kind == "add":
            name, wanted = str(len(asked)), dict(what)
            asked.append(what)
            engine.add(request(name, wanted.pop("tokens"), **wanted))
        elif kind == "step":
            for _ in range(what):
                outcome.take(engine.step())
            check(engine)
        elif kind == "cancel":
            cancelled.add(str(what))
            engine.cancel(str(what))
        else:
            _misbehave(session, what)
    run(engine, outcome)
    for number, what in enumerate(asked):
        name, limit = str(number), min(what["max_tokens"], engine.context - len(what["tokens"]) + 1)
        alone = answer_alone(what["tokens"], limit)
        for index in range(what["n"]):
            finished = outcome.finished.get((name, index))
            if name in cancelled and (finished is None or finished.reason == "cancelled"):
                assert outcome.tokens[name, index] == alone[: len(outcome.tokens[name, index])]
                continue
            assert finished is not None and outcome.tokens[name, index] == alone
            usage = finished.usage
            assert usage.local_tokens + usage.daemon_tokens + usage.computed_tokens == usage.prompt_tokens
    engine.close()
    check_blocks(engine.space, [])
    assert engine.scheduler.host.used_blocks == 0
    assert all(lease.released for lease in session.leases)


def test_a_daemons_blocks_are_those_that_were_computed() -> None:
    """The engine stores the same whether it was computed, shared, swapped or restored before."""
    stored = []
    for swap_blocks in (0, 1000):
        session = MemorySession(twin_pool(4).payload_bytes(4))
        for _ in range(2):
            engine = _engine(session, 40, swap_blocks, "priority", 10.0)
            for n in range(12):
                engine.add(request(str(n), [(n % 3 + k) % 64 for k in range(100)] + [n], 60, priority=n % 3))
            run(engine)
            engine.close()
        stored.append({key: payload.tobytes() for key, payload in session.blocks.items()})
    common = stored[0].keys() & stored[1].keys()
    assert len(common) == 3 + 12
    assert all(np.array_equal(stored[0][key], stored[1][key]) for key in common)
