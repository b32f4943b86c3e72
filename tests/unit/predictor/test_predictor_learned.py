"""The learned predictor: whose chance a guess has, and models in files."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_predictor.base import Hint, PredictorRequest
from kvstore_predictor.learned import LearnedPredictor
from kvstore_predictor.return_trees import COLUMNS, ReturnTrees, without_trees
from kvstore_predictor.session_return import SessionReturn
from kvstored.config import ConfigError, load_config
from kvstored.predictor_names import LEARNED
from kvstored.store.prefetch.guarded_predictor import create_predictor
from kvstored.store.prefetch.model_file import read_model, write_model
from tests.reference.return_model import small_arrays, small_trees


def keys(session: int, blocks: int) -> list[bytes]:
    return [session.to_bytes(8, "big") + block.to_bytes(8, "big") for block in range(blocks)]


def serve(predictor: Any, requests: int, *, pause_s: float = 10.0, sessions: int = 10) -> float:
    """Sessions that go on, one after the other."""
    chance, now_s, lengths = random.Random(1), 0.0, [4] * sessions
    for number in range(requests):
        now_s += pause_s / sessions
        session = number % sessions
        lengths[session] += chance.randint(0, 1)
        predictor.requested(PredictorRequest(0, keys(session, lengths[session]), number), now_s)
    return now_s


def state_of(predictor: Any) -> dict[str, Any]:
    pieces: dict[str, list[Any]] = {}
    for name, piece in predictor.export_state():
        pieces.setdefault(name, []).append(piece)
    return {name: np.concatenate(each) for name, each in pieces.items()}


def chances(predictor: Any, now_s: float, horizon_s: float = 10.0) -> dict[bytes, float]:
    return {guess.key: guess.probability for guess in predictor.guesses(now_s, horizon_s, 100)}


def test_without_trees_it_says_what_session_return_says() -> None:
    plain, learned = SessionReturn(), LearnedPredictor(without_trees())
    now_s = serve(plain, 300)
    serve(learned, 300)
    expected = chances(plain, now_s)
    assert expected and chances(learned, now_s) == pytest.approx(expected, abs=1e-4)


def test_the_model_moves_chances_where_it_knows_the_chain() -> None:
    plain, learned = SessionReturn(), LearnedPredictor(ReturnTrees(small_arrays(up=2.0, down=-2.0)))
    now_s = serve(plain, 20)
    serve(learned, 20)
    expected, found = chances(plain, now_s), chances(learned, now_s)
    assert set(found) == set(expected)
    assert max(abs(found[key] - expected[key]) for key in found) > 0.05


def test_a_chain_unlike_those_of_the_training_keeps_session_returns_chance() -> None:
    arrays = small_arrays(up=2.0, down=-2.0)
    arrays["high"] = arrays["high"].copy()
    arrays["high"][COLUMNS.index("length")] = 1.0  # logarithm: chains of two blocks
    plain, learned = SessionReturn(), LearnedPredictor(ReturnTrees(arrays))
    now_s = serve(plain, 20)
    serve(learned, 20)
    assert chances(learned, now_s) == chances(plain, now_s)


def test_what_an_engine_announced_keeps_its_chance() -> None:
    learned = LearnedPredictor(ReturnTrees(small_arrays(up=-3.0, down=-3.0)))
    now_s = serve(learned, 20)
    chain = keys(3, 4)
    learned.requested(PredictorRequest(0, chain), now_s)
    learned.hinted(0, chain[-1], Hint(due_s=now_s + 5.0), now_s)
    assert chances(learned, now_s)[chain[-1]] == pytest.approx(0.95)


def test_a_model_that_foretells_worse_loses_its_say() -> None:
    worse, better = LearnedPredictor(ReturnTrees(small_arrays(up=-4.0, down=-4.0))), LearnedPredictor(without_trees())
    now_s = serve(worse, 3000)
    serve(better, 3000)
    assert worse.say(10.0) < 0.01
    assert better.say(10.0) == pytest.approx(0.5, abs=0.01)  # both say the same
    plain = SessionReturn()
    serve(plain, 3000)
    expected = chances(plain, now_s)
    assert chances(worse, now_s) == pytest.approx(expected, abs=0.02)


def test_what_was_deleted_is_not_taken_for_a_return() -> None:
    learned = LearnedPredictor(ReturnTrees(small_arrays(up=4.0, down=4.0)))
    for number in range(320):  # none of these goes on, and all are deleted
        learned.requested(PredictorRequest(0, keys(number, 4), number), number * 0.1)
    before = learned.say(10.0)
    learned.forget(0, None)
    learned.requested(PredictorRequest(0, keys(10_000, 4), 10_000), 1000.0)
    assert learned.say(10.0) == before


def test_another_models_losses_are_not_taken_over() -> None:
    worse = LearnedPredictor(ReturnTrees(small_arrays(up=-4.0, down=-4.0)))
    serve(worse, 2000)
    state = state_of(worse)
    same, other = LearnedPredictor(ReturnTrees(small_arrays(up=-4.0, down=-4.0))), LearnedPredictor(small_trees())
    same.import_state(state, 0.0)
    other.import_state(state, 0.0)
    assert same.say(10.0) == worse.say(10.0) < 0.1
    assert other.say(10.0) == 0.5


def test_a_clock_that_was_set_back_costs_nothing() -> None:
    before, after = LearnedPredictor(small_trees()), LearnedPredictor(small_trees())
    now_s = serve(before, 300)
    after.import_state(state_of(before), 30 * 86_400.0)
    serve(after, 300)
    assert chances(after, now_s)


def test_a_model_goes_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    write_model(path, small_arrays())
    assert read_model(path).digest == small_trees().digest
    predictor = create_predictor(LEARNED, path)
    assert predictor is not None and predictor.name == LEARNED
    assert [each.name for each in tmp_path.iterdir()] == ["m.npz"]


def _circle(arrays: dict[str, Any]) -> None:
    arrays["left"] = np.array([1, 0, 2, 4, 4, 5], np.int32)


def _outside(arrays: dict[str, Any]) -> None:
    arrays["right"] = np.array([2, 1, 2, 5, 4, 77], np.int32)


def _version(arrays: dict[str, Any]) -> None:
    arrays["version"] = np.array(99)


def _features(arrays: dict[str, Any]) -> None:
    arrays["columns"] = np.array(["age"])


def _nan(arrays: dict[str, Any]) -> None:
    arrays["value"] = np.full(6, np.nan)


def _inf(arrays: dict[str, Any]) -> None:
    arrays["value"] = np.array([0.0, np.inf, -np.inf, 0.0, np.inf, -np.inf])


def _large(arrays: dict[str, Any]) -> None:
    arrays["value"] = np.full(6, 1e308)  # two of them are over what a float can hold


def _steep(arrays: dict[str, Any]) -> None:
    arrays["calibration"] = np.array([0.0, np.inf])


def _many(arrays: dict[str, Any]) -> None:
    arrays["roots"] = np.zeros(257, np.int32)


def _deep(arrays: dict[str, Any]) -> None:
    """A tree of nine steps: each inner node leads to the next one and to the leaf."""
    nodes, ends = np.arange(10, dtype=np.int32), [9]
    arrays |= {
        "column": np.zeros(10, np.int32), "threshold": np.zeros(10), "left": np.append(nodes[1:], nodes[ends]),
        "right": nodes[ends * 10], "value": np.zeros(10), "roots": np.zeros(1, np.int32),
    }  # fmt: skip


def _pickled(arrays: dict[str, Any]) -> None:
    arrays["value"] = np.array([object()] * 6)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_circle, "circle"), (_outside, "points outside"), (_version, "version 99"), (_features, "other features"),
        (_nan, "no numbers"), (_inf, "too large"), (_large, "too large"), (_steep, "too large"), (_many, "257 trees"),
        (_deep, "deeper"), (_pickled, "Python objects"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_model_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], words: str
) -> None:
    arrays = small_arrays()
    damage(arrays)
    path = tmp_path / "m.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=words) as caught:
        read_model(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04" + bytes(50)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged or no model"):
        read_model(path)


def npy(header: str, content: bytes = b"") -> bytes:
    """A member of a .npz file."""
    line = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + content


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("value.npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1125899906842624,)}"), "announces shape"),
        ("value.npy", npy("{'descr': '<U0', 'fortran_order': False, 'shape': (1125899906842624,)}"), "announces shape"),
        ("value.npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", bytes(8)), "announces shape"),
        ("value.npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,"), "no model"),
        ("value.npy", npy("(" * 5000), "no model"),
        ("value.npy", npy("{}" + " " * 20_000), "no model"),
        ("value.npy", b"\x93NUMPY\x09\x00", "version"),
        ("value.npy", b"", "no model"),
        ("value", b"text", "no model"),
    ],
)
def test_a_member_that_is_no_array_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = tmp_path / "m.npz"
    arrays = small_arrays()
    del arrays["value"]
    np.savez(path, **arrays)
    with zipfile.ZipFile(path, "a") as packed:
        packed.writestr(name, content)
    with pytest.raises(ValueError, match=words) as caught:
        read_model(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_cut_or_flipped_never_crashes(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    write_model(path, small_arrays())
    good, chance = path.read_bytes(), random.Random(0)
    for _ in range(200):
        bad = bytearray(good[: chance.randint(1, len(good))])
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        try:
            read_model(path)
        except ValueError as error:
            assert str(path) in str(error)


def test_the_settings_belong_together(tmp_path: Path) -> None:
    for settings in (["prefetch.predictor=learned"], [f"prefetch.model={tmp_path}/m.npz"]):
        with pytest.raises(ConfigError, match="set both or none"):
            load_config(None, settings)
    with pytest.raises(ValueError, match="does not exist"):
        create_predictor(LEARNED, tmp_path / "m.npz")
