"""The comparisons with rivals: what needs no rival. Turns, figures, a tool's recorded output, the line protocol."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.reference.benchmark_scripts import BENCHMARKS, importable

LMCACHE_PRINTED = """\
KV shape: 8 layers, 8 heads x 64, dtype=float16, blocks=512x16, kv=2
[rank 0] Allocated 8 KV tensors on cpu
[rank 0] REGISTER_KV_CACHE: OK

=== Request seq=1 ===
  [seq 1/cold] LOOKUP: 0/8 chunks hit (21.6 ms)
  [seq 1/cold] CHECKSUM: 68e0e31cc9097473 (8 chunks)
  [seq 1/cold] STORE: stored (2048 tokens, 483.3 ms, 1 writers)
  [seq 1/warm] LOOKUP: 8/8 chunks hit (5.2 ms)
  [seq 1/warm] RETRIEVE: retrieved (2048 tokens, 92.1 ms, 1 workers)
  [seq 1/warm] CHECKSUM: 68e0e31cc9097473 (8 chunks)
  [seq 1] CHECKSUM MATCH OK

=== Request seq=2 ===
  [seq 2/cold] LOOKUP: 0/8 chunks hit (2.0 ms)
  [seq 2/cold] STORE: stored (2048 tokens, 292.9 ms, 1 writers)
  [seq 2/warm] LOOKUP: 8/8 chunks hit (6.7 ms)
  [seq 2/warm] RETRIEVE: retrieved (2048 tokens, 21.6 ms, 1 workers)
----------------------- Warm Lookup (ms) -----------------------
count:                                                         2
mean:                                                       5.93
"""
ECHO = """
from serving import serve
def fail(): raise ValueError("no such request")
def chatter(): print("a library prints"); return 2
serve({"add": lambda a, b: a + b, "fail": fail, "chatter": chatter})
"""


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["rivals.lmcache", "rivals.values", "rivals.vllm_fs", "many_clients", "degraded"])
def test_a_benchmark_loads_without_its_rival_installed(name: str) -> None:
    load(name)


def test_the_tools_output_is_read_by_operation_and_a_lookup_that_misses_does_not_count() -> None:
    found = load("rivals.lmcache").parse_own_tool(LMCACHE_PRINTED)

    assert found == {"lookup": [5.2, 6.7], "store": [483.3, 292.9], "retrieve": [92.1, 21.6]}


def test_each_round_has_every_contender_and_the_first_one_changes() -> None:
    order: list[tuple[str, int]] = []

    def act(name: str, number: int) -> list[float]:
        order.append((name, number))
        return [float(number)]

    samples = load("rivals.turns").take_turns(
        {name: lambda number, name=name: act(name, number) for name in "AB"}, rounds=3, warm_up=1
    )

    assert order == [("A", 0), ("B", 0), ("B", 1), ("A", 1), ("A", 2), ("B", 2), ("B", 3), ("A", 3)]
    assert samples == {"A": [1.0, 2.0, 3.0], "B": [1.0, 2.0, 3.0]}, "the warm-up round is not a sample"


def test_each_mode_of_a_rival_is_judged_where_its_median_is_best() -> None:
    lmcache = load("rivals.lmcache")
    engine, server = lmcache.MODES
    mib32 = 32 * 1024 * 1024 / 1e9
    tool = f"{engine}, its own tool"

    first, second = lmcache.speed_rows(
        "store", {"kvstored": [0.01], engine: [0.09], tool: [0.02, 0.5, 0.02], server: [0.04]}
    )

    assert (first.baseline_name, first.baseline, first.value) == (tool, mib32 / 0.02, mib32 / 0.01)
    assert first.ratio == pytest.approx(2.0) and first.met is False
    assert (second.baseline_name, second.met) == (server, True)


def test_beside_a_ratio_stands_what_the_copies_alone_would_reach() -> None:
    limits, lmcache, report = load("rivals.turns"), load("rivals.lmcache"), load("support.report")
    engine, server = lmcache.MODES
    samples = {"kvstored": [0.02], engine: [0.03], server: [0.06], limits.COPIES: [0.015], limits.MEMCPY: [0.012]}

    first, second = lmcache.speed_rows("store", samples)

    assert (first.baseline_name, second.baseline_name) == (engine, server), "a limit is no rival"
    assert (first.ratio, first.ceiling) == (pytest.approx(1.5), pytest.approx(2.0))
    assert (second.ceiling, second.baseline_of_memcpy) == (pytest.approx(4.0), pytest.approx(0.2))
    shown = report.table([first.as_json(), report.within("other", 1.0, "ms", 2.0).as_json()])
    assert "possible" in shown and "2.00x by the copies alone; the baseline is 0.40 of memcpy" in shown
    assert "possible" not in report.table([report.within("other", 1.0, "ms", 2.0).as_json()])


def test_beside_a_lookup_stands_an_empty_echo() -> None:
    limits = load("rivals.turns")

    middle, _ = load("rivals.lmcache").lookup_rows(
        "lookup", {"kvstored": [0.003], "rival": [0.01], limits.ECHO: [0.002]}
    )

    assert (middle.baseline_name, middle.ratio, middle.ceiling) == ("rival", pytest.approx(0.3), pytest.approx(0.2))


def test_the_copies_alone_are_asked_for_like_any_contender() -> None:
    limits = load("rivals.turns")

    with limits.copies() as alone:
        alone.prepare(4, 1 << 16)
        seconds = {
            f"{name} of a {operation}": action(turn)
            for operation in ("put", "get")
            for name, action in alone.beside(operation, 1 << 16).items()
            for turn in range(3)
        }

    assert len(seconds) == 4 and all(one > 0 for (one,) in seconds.values())


def test_a_lookup_is_judged_by_both_percentiles_of_the_same_rival() -> None:
    samples = {"kvstored": [0.001] * 98 + [0.5] * 2, "rival": [0.01] * 100, "worse": [0.02] * 100}

    middle, tail = load("rivals.lmcache").lookup_rows("lookup", samples)

    assert (middle.name, middle.baseline_name, middle.met) == ("lookup_p50", "rival", True)
    assert (tail.name, tail.baseline_name, tail.met) == ("lookup_p99", "rival", False)


def test_a_contender_answers_fails_and_goes_on_and_a_librarys_prints_are_no_answers(tmp_path: Path) -> None:
    contender = load("rivals.contender")
    script = tmp_path / "echo.py"
    script.write_text(ECHO)

    with contender.contender(
        "echo", [sys.executable, script], {"PYTHONPATH": str(BENCHMARKS / "rivals/workers")}
    ) as one:
        assert one.operations == ("add", "chatter", "fail")
        assert one.ask("add", a=1, b=2) == 3
        assert one.ask("chatter") == 2
        with pytest.raises(contender.ContenderError, match="echo could not fail: ValueError: no such request"):
            one.ask("fail")
        assert one.ask("add", a=2, b=2) == 4


def test_a_contender_that_ends_is_reported_with_the_end_of_its_log() -> None:
    contender = load("rivals.contender")
    command = [sys.executable, "-c", "raise SystemExit('no module named rival')"]

    starting = contender.contender("rival", command)

    with pytest.raises(contender.ContenderError, match=r"rival ended\n.*no module named rival"):
        starting.__enter__()


def test_an_environment_is_complete_only_for_the_list_it_was_made_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments = load("rivals.environments")
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    older = environments.Environment("one", (("rival==1",),), "nothing")
    newer = environments.Environment("one", (("rival==2",),), "nothing")
    ran: list[list[str]] = []
    monkeypatch.setattr(environments, "_run", lambda command, name: ran.append(command))
    older.directory.mkdir()

    older.ensure()
    older.ensure()

    assert older.is_complete and not newer.is_complete
    assert [command[-1] for command in ran] == [str(older.directory), "rival==1"], "made once"
    assert older.directory == tmp_path / ".venv-rivals-one"


def test_a_step_that_fails_is_one_clear_message() -> None:
    environments = load("rivals.environments")

    with pytest.raises(environments.CannotSetUp, match=r"one: .* failed:\nno such version"):
        environments._run([sys.executable, "-c", "raise SystemExit('no such version')"], "one")


def test_redis_that_is_not_installed_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = load("rivals.environments")
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)

    with pytest.raises(environments.CannotSetUp, match="apt-get install redis-server"):
        environments.redis_server()


def test_a_batch_that_is_not_the_one_put_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "rivals/workers"))
    batch = load("serving").Batch(4, 16384)
    batch.prepare(1)
    put = batch.source.copy()
    batch.prepare(2)

    batch.target[:] = put
    with pytest.raises(RuntimeError, match="batch 2 did not come back"):
        batch.check(2)
    batch.check(1)
    batch.target[3, 4096] ^= 1
    with pytest.raises(RuntimeError, match="batch 1"):
        batch.check(1)


def test_agents_share_beginnings_that_end_anywhere_and_go_on() -> None:
    agents = load("support.traces").agents_of(12, 4, 500)

    def shared(left: list[int], right: list[int]) -> int:
        return next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(left))

    best = [max(shared(earlier, prompt) for earlier in agents.before) for prompt in agents.after]
    assert len(agents.after) == 6 and all(any(p[: len(e)] == e for e in agents.before) for p in agents.after[:4])
    assert min(best) >= 250 and len({tokens % 128 for tokens in best}) > 2
    assert load("support.traces").Agents([[1, 2, 3, 4, 5], [1, 2, 9, 9]], []).distinct_blocks(2) == 3


def test_one_bit_of_each_block_stored_between_two_times_is_flipped_and_ours_finds_it(tmp_path: Path) -> None:
    stores, stored = load("rivals.vllm_stores"), load("torture_runs.stored_directory")
    transfers = importlib.import_module("kvstore_tiers.testing.transfers")
    payload = np.arange(5000, dtype=np.uint8)
    with closing(stored.NvmeTier.open(tmp_path / "nvme", 4 << 20, slab_bytes=256 << 10, io_threads=1)) as tier:
        for number, created_ns in enumerate((10, 20, 29, 30), 1):
            header = stored.StoredBlock(number, stored.TENANTS[0], [payload]).header()
            assert transfers.put(tier, replace(header, created_ns=created_ns), payload) is not None
    ours = stores.Ours(tmp_path / "state").blocks(tmp_path, 20, 30)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.slab")}

    stores.flip(ours)

    assert [end - start for ((_, start, end),) in ours] == [5000, 5000]
    changed = [
        (old ^ new).bit_count()
        for path, raw in before.items()
        for old, new in zip(raw, path.read_bytes(), strict=True)
        if old != new
    ]
    assert changed == [1, 1]
    with closing(stored.NvmeTier.open(tmp_path / "nvme", 4 << 20, slab_bytes=256 << 10, io_threads=1)) as tier:
        read = {header.created_ns: transfers.get(tier, slot, header.key, 5000) for slot, header in tier.recover()}
    assert {created_ns: outcome.ok for created_ns, (outcome, _) in read.items()} == {
        10: True,
        20: False,
        29: False,
        30: True,
    }


def test_files_of_a_block_are_one_place_each_and_the_least_used_files_leave_first(tmp_path: Path) -> None:
    stores = load("rivals.vllm_stores")
    for at, name in enumerate(("aa_g0/1", "aa_g1/1", "ab_g0/2", "ac_g0/3")):
        (tmp_path / f"{name}.bin").parent.mkdir()
        (tmp_path / f"{name}.bin").write_bytes(bytes(100))
        os.utime(tmp_path / f"{name}.bin", (at, at))

    blocks = stores.FileTier().blocks(tmp_path, 0, 3_000_000_000)
    stores.remove_unused(tmp_path.rglob("*.bin"), 150)

    assert [[path.parent.name for path, _, _ in places] for places in blocks] == [["aa_g0", "aa_g1"], ["ab_g0"]]
    assert sorted(path.stem for path in tmp_path.rglob("*.bin")) == ["2", "3"]
