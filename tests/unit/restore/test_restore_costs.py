"""Costs of computing and loading are learned, kept over a restart, and say when both are done."""

from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.restore.profile import profile_path
from kvstore_restore.costs import ComputeCost, Contention, LinkCost
from kvstore_restore.learned import LearnedCosts

COMPUTE = ComputeCost(0.002, 0.0005, 1e-7)
LINKS = {"host": LinkCost(0.0005, 1 / 5e9), "nvme": LinkCost(0.002, 1 / 1e9)}


def _trained() -> LearnedCosts:
    learned, random = LearnedCosts(), np.random.default_rng(3)
    for _ in range(200):
        tokens, first = int(random.integers(16, 512)), int(random.integers(0, 16_000))
        noise = float(random.uniform(0.95, 1.05))
        learned.observe_batch([(tokens, first)], COMPUTE.chunk_s(first, tokens) * noise)
        nbytes = int(random.integers(1, 64)) << 20
        for tier, link in LINKS.items():
            learned.observe_load(tier, nbytes, link.load_s(nbytes) * noise)
    return learned


def test_each_tier_has_its_own_link() -> None:
    costs = _trained().costs()
    for tier, link in LINKS.items():
        assert costs.links[tier].load_s(32 << 20) == pytest.approx(link.load_s(32 << 20), rel=0.1)
    assert costs.compute.chunk_s(8000, 256) == pytest.approx(COMPUTE.chunk_s(8000, 256), rel=0.1)


def test_contention_is_learned_from_work_beside_the_other() -> None:
    learned = _trained()
    for _ in range(60):
        learned.observe_batch([(256, 4000)], COMPUTE.chunk_s(4000, 256) * 1.5, beside_loading=True)
        learned.observe_load("host", 16 << 20, LINKS["host"].load_s(16 << 20) * 1.25, beside_computing=True)
    contention = learned.costs().contention
    assert contention.compute == pytest.approx(1.5, rel=0.1)
    assert contention.load == pytest.approx(1.25, rel=0.1)


def test_costs_survive_a_restart_but_not_damage(tmp_path: Path) -> None:
    learned, path = _trained(), tmp_path / "kept" / "costs.json"
    learned.save(path)
    assert LearnedCosts.load(path).costs() == learned.costs()
    path.write_text(path.read_text()[:-20])
    assert LearnedCosts.load(path).costs() == LearnedCosts().costs()
    path.write_text('{"version": 1, "compute": 3, "links": [], "contention": []}')
    assert LearnedCosts.load(path).costs() == LearnedCosts().costs()
    path.write_text("[1]")
    assert LearnedCosts.load(tmp_path / "absent").costs("host").links.keys() == {"host"}


def test_nonsense_is_not_learned() -> None:
    learned = LearnedCosts()
    for seconds in (float("nan"), float("inf"), -1.0):
        learned.observe_batch([(16, 0)], seconds)
        learned.observe_batch([(16, 0)], seconds, beside_loading=True)
        learned.observe_load("host", 1 << 20, seconds)
    learned.observe_batch([(0, 0)], 1.0)
    costs = learned.costs("host")
    assert costs.compute.chunk_s(0, 16) > 0
    assert 1.0 <= costs.contention.compute <= 4.0


def test_the_one_that_is_left_runs_on_alone() -> None:
    both = Contention(2.0, 1.5)
    assert both.finish_s(1.0, 0.0) == 1.0
    assert both.finish_s(0.0, 1.0) == 1.0
    assert both.finish_s(1.0, 10.0) == pytest.approx(2.0 + 10.0 - 2.0 / 1.5)
    assert both.finish_s(10.0, 1.0) == pytest.approx(1.5 + 10.0 - 1.5 / 2.0)
    assert Contention().finish_s(3.0, 2.0) == 3.0


def test_a_prefill_is_the_sum_of_its_steps() -> None:
    learned = _trained()
    parts = learned.batch_s([(512, 0)]) + learned.batch_s([(512, 512)]) + learned.batch_s([(76, 1024)])
    assert learned.prefill_s(0, 1100, 512) == pytest.approx(parts)
    assert learned.prefill_s(640, 640, 512) == learned.batch_s([]) == 0


def test_a_step_of_several_pieces_pays_its_fixed_cost_once() -> None:
    learned = _trained()
    apart = learned.batch_s([(64, 0)]) + learned.batch_s([(64, 4000)])
    assert learned.batch_s([(64, 0), (64, 4000)]) == pytest.approx(apart - learned.costs().compute.fixed_s)


def test_costs_follow_a_machine_that_becomes_slower() -> None:
    learned = _trained()
    for step in range(150):
        tokens, first = 64 + step % 8 * 64, step % 5 * 1000
        learned.observe_batch([(tokens, first)], 3 * COMPUTE.chunk_s(first, tokens))
    assert learned.batch_s([(512, 2000)]) == pytest.approx(3 * COMPUTE.chunk_s(2000, 512), rel=0.2)


def test_one_descheduled_step_does_not_wreck_the_fit() -> None:
    learned = _trained()
    learned.observe_batch([(512, 0)], 100 * COMPUTE.chunk_s(0, 512))
    assert learned.batch_s([(512, 0)]) == pytest.approx(COMPUTE.chunk_s(0, 512), rel=0.6)


@pytest.mark.parametrize(("token_s", "step_s"), [(0.01 / 512, 0.01), (0.01 / 2048, 0.006), (1 / 500, 0.1)])
def test_answers_that_are_decoded_say_nothing_of_the_scale_of_prompts(token_s: float, step_s: float) -> None:
    learned, device = LearnedCosts(), ComputeCost(step_s, token_s, 0.0)  # a step costs what hundreds of tokens do
    for _ in range(4):
        learned.observe_batch([(512, 0)], device.chunk_s(0, 512))
        for at in range(512, 562):
            learned.observe_batch([(1, at)], device.chunk_s(at, 1))
        assert learned.batch_s([(512, 0)]) == pytest.approx(device.chunk_s(0, 512), rel=0.2)


@pytest.mark.parametrize("beside_computing", [False, True])
def test_a_link_that_becomes_another_is_followed_at_once(beside_computing: bool) -> None:
    learned = _trained()
    before = learned.load_s("nvme", 1 << 20)
    learned.observe_load("nvme", 1 << 20, before * 30, beside_computing=beside_computing)
    assert learned.load_s("nvme", 1 << 20) < before * 10, "once may be an accident"
    learned.observe_load("nvme", 1 << 20, before * 30, beside_computing=beside_computing)
    assert learned.load_s("nvme", 1 << 20) == pytest.approx(before * 30, rel=0.1)


def test_an_expectation_holds_until_something_was_loaded() -> None:
    learned = LearnedCosts()
    learned.expect_load("nvme", 1 << 20, 1e6)
    assert learned.load_s("nvme", 1 << 20) == pytest.approx(1e6)
    learned.observe_load("nvme", 1 << 20, 0.002)
    learned.expect_load("nvme", 1 << 20, 1e6)
    assert learned.load_s("nvme", 1 << 20) == pytest.approx(0.002)
    assert learned.load_s("nvme", 4 << 20) == pytest.approx(0.0074)


def test_a_profile_belongs_to_a_model_a_thread_count_and_a_processor(tmp_path: Path) -> None:
    paths = {profile_path(tmp_path, "ab" * 16, threads) for threads in (1, 2)} | {profile_path(tmp_path, "cd" * 16, 1)}
    paths |= {profile_path(tmp_path, "ab" * 16, 2, part=f"stage{stage}of2") for stage in range(2)}
    assert len(paths) == 5 and {path.parent for path in paths} == {tmp_path / "profiles"}
    blocked = tmp_path / "file"
    blocked.write_text("")
    LearnedCosts().save(profile_path(blocked, "ef" * 16, 2))  # which cannot be kept, and is not missed
