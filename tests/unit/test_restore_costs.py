"""Costs of computing and loading are learned, kept over a restart, and say when both are done."""

from pathlib import Path

import numpy as np
import pytest

from kvstore_client.restore.costs import ComputeCost, Contention, LinkCost
from kvstore_client.restore.learned import LearnedCosts

COMPUTE = ComputeCost(0.002, 0.0005, 1e-7)
LINKS = {"host": LinkCost(0.0005, 1 / 5e9), "nvme": LinkCost(0.002, 1 / 1e9)}


def _trained() -> LearnedCosts:
    learned, random = LearnedCosts(), np.random.default_rng(3)
    for _ in range(200):
        tokens, first = int(random.integers(16, 512)), int(random.integers(0, 16_000))
        noise = float(random.uniform(0.95, 1.05))
        learned.observe_compute(first, tokens, COMPUTE.chunk_s(first, tokens) * noise)
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
        learned.observe_compute(4000, 256, COMPUTE.chunk_s(4000, 256) * 1.5, beside_loading=True)
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
        learned.observe_compute(0, 16, seconds)
        learned.observe_compute(0, 16, seconds, beside_loading=True)
        learned.observe_load("host", 1 << 20, seconds)
    learned.observe_compute(0, 0, 1.0)
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
