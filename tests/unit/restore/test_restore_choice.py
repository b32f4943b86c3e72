"""The choice between loading and computing: right at once where costs are known, soon where they are not, and never
far from the better path.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore_restore.choice import TRIAL_EVERY, Chosen, Hit, LoadChoice
from kvstore_restore.learned import LearnedCosts
from tests.reference.examples import each_nth

BLOCK_TOKENS, BLOCK_BYTES = 64, 1 << 20


@dataclass
class Machine:
    """The times that computing and loading take, and what its daemon predicts of a load: `believed` times the truth."""

    token_s: float = 1e-3
    fixed_s: float = 2e-3
    block_s: float = 1e-3
    believed: float = 1.0
    own_s: float = 1e-4
    now_s: float = 1000.0
    noise: float = 0.0

    def compute_s(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens

    def load_s(self, blocks: int) -> float:
        return self.own_s + self.block_s * blocks if blocks else 0.0

    def hit(self, blocks: int, tail: int = 8, tier: str = "nvme") -> Hit:
        expected = [0.0 if tier == "host" else self.block_s * self.believed] * blocks
        return Hit([tier] * blocks, expected, BLOCK_TOKENS, BLOCK_BYTES, blocks * BLOCK_TOKENS + tail)

    def serve(self, choice: LoadChoice, hit: Hit, all_or_none: bool = False) -> tuple[float, Chosen]:
        """One request: its seconds to the first token. A load that outlasts its deadline is computed as well."""
        chosen = choice.choose(hit, all_or_none=all_or_none)
        load_s = self.load_s(chosen.blocks) * (1 + random.uniform(0, self.noise))
        loaded = chosen.blocks if load_s <= chosen.deadline_s else 0
        load_s = min(load_s, chosen.deadline_s)
        choice.observe_load(hit, chosen, loaded, load_s)
        rest = hit.tokens - hit.held(loaded)
        compute_s = self.compute_s(rest) * (1 + random.uniform(0, self.noise))
        choice.observe_compute(hit.held(loaded), rest, compute_s)
        self.now_s += load_s + compute_s
        return load_s + compute_s, chosen

    def better_s(self, hit: Hit) -> float:
        blocks = len(hit.tiers)
        everything = self.load_s(blocks) + self.compute_s(hit.tokens - hit.held(blocks))
        return min(everything, self.compute_s(hit.tokens))


def _knowing(machine: Machine) -> LoadChoice:
    """A choice that saw a few prompts computed."""
    choice = LoadChoice(LearnedCosts(lambda: machine.now_s))
    for tokens in (64, 512, 128, 1024, 256, 2048) * 3:
        choice.observe_compute(0, tokens, machine.compute_s(tokens))
    return choice


def test_all_is_loaded_until_something_was_computed() -> None:
    hit = Machine(block_s=10.0).hit(8)
    chosen = LoadChoice().choose(hit)
    assert chosen.blocks == 8 and chosen.deadline_s == float("inf")


@pytest.mark.parametrize(("block_s", "blocks"), [(0.002, 8), (0.63, 0)])
def test_known_costs_decide_at_once(block_s: float, blocks: int) -> None:
    machine = Machine(block_s=block_s)
    assert _knowing(machine).choose(machine.hit(8)).blocks == blocks


def test_blocks_in_memory_are_loaded_where_those_on_a_slow_disk_are_computed() -> None:
    machine = Machine()
    choice = _knowing(machine)
    hit = Hit(["host"] * 5 + ["nvme"] * 5, [0.0] * 5 + [0.5] * 5, BLOCK_TOKENS, BLOCK_BYTES, 700)
    assert choice.choose(hit).blocks == 5
    behind = Hit(["nvme"] * 5 + ["host"] * 5, [0.5] * 5 + [0.0] * 5, BLOCK_TOKENS, BLOCK_BYTES, 700)
    assert choice.choose(behind).blocks == 0
    worth = Hit(["nvme"] * 2 + ["host"] * 8, [0.1] * 2 + [0.0] * 8, BLOCK_TOKENS, BLOCK_BYTES, 700)
    assert choice.choose(worth).blocks == 10


def test_a_load_is_given_up_once_it_could_have_been_computed() -> None:
    machine = Machine(block_s=0.01)
    chosen = _knowing(machine).choose(machine.hit(8))
    assert 4 * 0.08 * 0.9 < chosen.deadline_s <= machine.compute_s(8 * BLOCK_TOKENS)


def test_a_load_that_hung_makes_loads_look_slower_and_time_makes_them_look_as_predicted_again() -> None:
    machine = Machine(block_s=0.01)
    choice = _knowing(machine)
    hit = machine.hit(8)
    before = choice.choose(hit)
    for _ in range(6):
        chosen = choice.choose(hit)
        choice.observe_load(hit, chosen, 0, chosen.deadline_s)
    assert choice.choose(hit).blocks == 0
    machine.now_s += 3600
    again = choice.choose(hit)
    assert again.blocks == 8 and again.load_s == pytest.approx(before.load_s, rel=0.3)


RATIOS = (0.1, 0.3, 0.7, 0.9, 1.1, 1.5, 3.0, 10.0)


@pytest.mark.parametrize("ratio", each_nth(RATIOS, 2))
@pytest.mark.parametrize("believed", [0.3, 1.0, 3.0])
def test_over_many_requests_it_takes_little_more_than_the_better_path(ratio: float, believed: float) -> None:
    random.seed(1)
    machine = Machine(block_s=ratio * 1e-3 * BLOCK_TOKENS, believed=believed, noise=0.1)
    choice = LoadChoice(LearnedCosts(lambda: machine.now_s))
    choice.observe_compute(0, 1000, machine.compute_s(1000))  # who stored the prefix computed it
    spent = better = 0.0
    for number in range(400):
        hit = machine.hit(8 + number % 5 * 8)
        seconds, _ = machine.serve(choice, hit)
        spent, better = spent + seconds, better + machine.better_s(hit) * 1.05  # the mean of the noise
    assert better / spent >= 0.97


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_first_step_that_warms_the_engine_up_misleads_for_a_few_requests_alone(
    is_restarted: bool, tmp_path: Path
) -> None:
    machine = Machine(block_s=1.3 * 1e-3 * BLOCK_TOKENS)
    choice = LoadChoice(LearnedCosts(lambda: machine.now_s))
    if is_restarted:
        choice = _knowing(machine)
        choice.save(tmp_path / "costs")
        choice = LoadChoice.load(tmp_path / "costs", clock=lambda: machine.now_s)
    choice.observe_compute(0, 1000, 1.7 * machine.compute_s(1000))
    hit = machine.hit(15)
    loaded = [machine.serve(choice, hit)[1].blocks for _ in range(12)]
    assert loaded[0] == (0 if is_restarted else 15), "what was known before counts"
    assert loaded[6:] == [0] * 6


@pytest.mark.parametrize("all_or_none", [False, True])
def test_where_the_paths_are_close_all_of_the_other_one_is_tried(all_or_none: bool) -> None:
    """A step has a cost of its own here, so that a short one says computing is slow, and so it is thought to be."""
    machine = Machine(fixed_s=0.15, block_s=1.3 / 15)
    choice = LoadChoice(LearnedCosts(lambda: machine.now_s))
    hit = machine.hit(15)
    for _ in range(4):
        choice.observe_compute(0, hit.tokens, 1.3 * machine.compute_s(hit.tokens))
    loaded = [machine.serve(choice, hit, all_or_none)[1].blocks for _ in range(40)]
    assert loaded[0] == 15 and loaded[-10:].count(0) >= 9


def test_short_steps_say_what_is_left_behind_a_load_and_change_nothing_else() -> None:
    machine = Machine(fixed_s=0.2, token_s=1e-3)
    choice = LoadChoice(LearnedCosts(lambda: machine.now_s))
    hit = machine.hit(15)
    for _ in range(3):
        choice.observe_compute(0, hit.tokens, machine.compute_s(hit.tokens))
    choice.choose(hit)
    whole_s = choice.compute_s(0, hit.tokens)
    assert whole_s == pytest.approx(machine.compute_s(hit.tokens), rel=0.1)
    assert choice.compute_s(960, 8) < 0.1
    for seconds in (0.208, 0.208, 5.0, 0.208):
        choice.observe_compute(960, 8, seconds)
    assert 0.19 < choice.compute_s(960, 8) < 0.3
    assert choice.compute_s(0, hit.tokens) == pytest.approx(whole_s)


@pytest.mark.parametrize("token_s", [2e-6, 1e-4, 1e-2, 1.0])
def test_machines_of_all_speeds_are_known_after_a_few_prompts(token_s: float) -> None:
    choice = LoadChoice()
    for tokens in (300, 2000, 1000, 500):
        choice.observe_compute(0, tokens, 0.001 + token_s * tokens)
    assert choice.compute_s(0, 1500) == pytest.approx(0.001 + 1500 * token_s, rel=0.6)
    for _ in range(10):  # and the machine gets busy
        choice.observe_compute(0, 1000, 8 * token_s * 1000)
    assert choice.compute_s(0, 1500) == pytest.approx(8 * 1500 * token_s, rel=0.4)


@pytest.mark.parametrize("change", [0.1, 10.0])
def test_a_change_is_noticed_though_the_other_path_is_taken_and_the_daemon_believes_what_was(change: float) -> None:
    machine = Machine(block_s=1e-3 * BLOCK_TOKENS * (3.0 if change < 1 else 0.3))
    choice = _knowing(machine)
    for _ in range(50):
        machine.serve(choice, machine.hit(16))
    machine.block_s *= change
    machine.believed /= change
    for _ in range(150):
        machine.serve(choice, machine.hit(16))
    chosen = [machine.serve(choice, machine.hit(16))[1] for _ in range(20)]
    right = 16 if change < 1 else 0
    assert sum(each.blocks == right for each in chosen) >= 17


def test_a_daemon_that_has_learned_is_not_corrected_again() -> None:
    machine = Machine(block_s=0.7e-3 * BLOCK_TOKENS, believed=0.1)
    choice = _knowing(machine)
    machine.serve(choice, machine.hit(16))
    machine.believed = 1.0
    chosen = choice.choose(machine.hit(16))
    assert chosen.blocks == 16 and chosen.load_s == pytest.approx(machine.load_s(16), rel=0.3)


def test_an_estimate_that_grew_past_what_was_measured_is_taken_as_it_is() -> None:
    machine = Machine(block_s=0.1e-3 * BLOCK_TOKENS, believed=0.25)
    choice = _knowing(machine)
    machine.serve(choice, machine.hit(16))
    machine.believed = 3.0  # a queue
    assert choice.choose(machine.hit(16)).load_s == pytest.approx(3.0 * machine.load_s(16), rel=0.1)


def test_trials_are_rare_and_cost_no_more_than_their_share() -> None:
    machine = Machine(block_s=1e-3 * BLOCK_TOKENS * 2)
    choice = _knowing(machine)
    served = [machine.serve(choice, machine.hit(16)) for _ in range(300)]
    trials = [chosen for _, chosen in served if chosen.is_trial]
    assert 1 <= len(trials) <= 300 / TRIAL_EVERY
    assert sum(seconds for seconds, _ in served) <= 300 * machine.better_s(machine.hit(16)) * 1.02


def test_more_steps_cost_more() -> None:
    machine = Machine(fixed_s=0.05)
    whole, chunked = LoadChoice(), LoadChoice(step_tokens=256)
    for choice in (whole, chunked):
        for tokens in (16, 64, 128, 256) * 20:
            choice.observe_compute(0, tokens, machine.compute_s(tokens))
    assert whole.compute_s(0, 1000) == pytest.approx(1.05, rel=0.1)
    assert chunked.compute_s(0, 1000) == pytest.approx(1.2, rel=0.1)


def _same(first: LoadChoice, second: LoadChoice, hit: Hit) -> bool:
    return first.choose(hit) == second.choose(hit)


def test_what_was_learned_outlives_the_process(tmp_path: Path) -> None:
    machine = Machine(block_s=0.03, believed=2.0)
    choice = _knowing(machine)
    for _ in range(10):
        machine.serve(choice, machine.hit(8))
    path = tmp_path / "below" / "costs.json"
    choice.save(path)
    again = LoadChoice.load(path, clock=lambda: machine.now_s)
    assert _same(choice, again, machine.hit(12))
    assert [item.name for item in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "no json",
        lambda kept: json.dumps({**kept, "version": 99}),
        lambda kept: json.dumps({**kept, "biases": {"nvme": 3}}),
        lambda kept: json.dumps({**kept, "biases": {"nvme": [2.0, 1.0]}}),
        lambda kept: json.dumps({**kept, "links": {"host": {"samples": 1, "coefficients": [1.0], "scale": 1.0}}}),
        lambda kept: json.dumps([]),
    ],
)
def test_a_damaged_file_is_a_new_start(tmp_path: Path, damage: Callable[[dict[str, object]], str]) -> None:
    path = tmp_path / "costs.json"
    machine = Machine()
    _knowing(machine).save(path)
    path.write_text(damage(json.loads(path.read_text())))
    assert _same(LoadChoice.load(path), LoadChoice(), machine.hit(4))
    assert _same(LoadChoice.load(tmp_path / "absent.json"), LoadChoice(), machine.hit(4))


def test_a_hit_leaves_a_token_and_names_a_time_for_each_block() -> None:
    with pytest.raises(ValueError, match="one token of a prompt"):
        Hit(["host"], [0.0], 64, 1, tokens=64)
    with pytest.raises(ValueError, match="1 tiers and 0 times"):
        Hit(["host"], [], 64, 1, tokens=65)
