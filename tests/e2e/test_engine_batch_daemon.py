"""The batch engine and a real daemon: many requests store and restore, and the daemon is killed under them."""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvstore_client import Session
from kvstore_engine.batching.engine import BatchEngine
from kvstore_engine.batching.settings import EngineSettings
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_restore.learned import LearnedCosts
from tests.reference.assumed_costs import assume
from tests.reference.batch_runs import Outcome, request, run
from tests.reference.block_invariants import check_blocks
from tests.reference.running_daemon import running_daemon
from tests.reference.twin_compute import StepClock, TwinCompute, TwinTokenizer, answer_alone, twin_pool


def _fingerprint(tenant: str) -> Fingerprint:
    group = LayerGroup(0, layers=(0,), bytes_per_token_per_layer=32)
    return Fingerprint(model_name="twin", weights_digest="twin", adapter_digest=tenant, groups=(group,))


def _engine(sessions: dict[str, Session], blocks: int = 256) -> BatchEngine:
    compute = TwinCompute(twin_pool(blocks), on_step=StepClock().step)
    costs = assume(LearnedCosts())  # computing looks slow: restore all that is stored
    return BatchEngine(
        compute,
        TwinTokenizer(),
        settings=EngineSettings(max_queue_s=1e9),
        sessions=sessions.get,
        costs=costs,
    )


def _prompt(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 64, count).tolist()
    return tokens


def _whole(prompt: list[int]) -> int:
    """Tokens of the storage blocks before the prompt's last token."""
    return (len(prompt) - 1) // 64 * 64


def _add(engine: BatchEngine, prompts: dict[str, list[int]]) -> None:
    for n, (name, prompt) in enumerate(prompts.items()):
        engine.add(request(name, prompt, 40, tenant=str(n % 2)))


def test_a_daemon_hears_how_long_each_answer_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    prompts = {str(n): _prompt(n, 100 + 30 * n) for n in range(4)}  # the first one's last step fills a block
    with running_daemon(f"daemon.record={path}") as daemon, daemon.connect(_fingerprint("0")) as session:
        engine = _engine({"": session})
        for n, (name, prompt) in enumerate(prompts.items()):
            engine.add(request(name, prompt, 29 + n))
        run(engine)
        engine.close()
    with gzip.open(path, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row.get("op") == "hint"]
    assert sorted((row["a"], row["f"]) for row in rows) == [
        (29 + n, (100 + 30 * n + 29 + n - 1) // 64) for n in range(4)
    ]


def test_requests_of_two_tenants_restore_what_they_stored_and_survive_the_daemon() -> None:
    prompts = {str(n): _prompt(n // 4, 100) + _prompt(100 + n, 30 + 10 * n) for n in range(12)}
    with running_daemon() as daemon, ExitStack() as stack:
        sessions = {name: stack.enter_context(daemon.connect(_fingerprint(name))) for name in ("0", "1")}
        cold = _engine(sessions)
        _add(cold, prompts)
        run(cold)
        cold.close()
        stored = cold.storer.counts
        assert stored["stored"] > 12 and set(stored) <= {"stored", "present"}
        for _attempt in range(20):  # a lookup that a busy machine answers too late is a miss
            warm = _engine(sessions)
            _add(warm, prompts)
            outcome = run(warm)
            warm.close()
            usages = [(prompts[name], finished.usage) for (name, _), finished in outcome.finished.items()]
            if all(usage.daemon_tokens + usage.local_tokens >= _whole(prompt) for prompt, usage in usages):
                break
        else:
            raise AssertionError("what was stored is not found")
        assert sum(usage.daemon_tokens for _, usage in usages) > 0
        hit = _engine(sessions, blocks=40)
        _add(hit, prompts)
        last = Outcome()
        for _ in range(20):
            last.take(hit.step())
        daemon.kill9()
        run(hit, last)
        hit.close()
        for name, prompt in prompts.items():
            for seen in (outcome, last):
                assert seen.tokens[name, 0] == answer_alone(prompt, 40)
        check_blocks(hit.space, [])
