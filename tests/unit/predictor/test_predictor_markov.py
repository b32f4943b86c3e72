"""Documents asked for in a cycle, and prompts that follow each other."""

from __future__ import annotations

import pytest

from kvstore_predictor.base import PredictorRequest
from kvstore_predictor.generations import Generations
from kvstore_predictor.markov import Markov, Successors


def document(number: int, blocks: int = 10) -> list[bytes]:
    return [bytes([1, number, at]) + bytes(13) for at in range(blocks)]


def question(number: int) -> list[bytes]:
    return [b"q" + number.to_bytes(15, "big")]


def test_documents_in_a_cycle_are_foreseen_in_their_order() -> None:
    predictor, now_s = Markov(), 0.0
    for turn in range(60):
        now_s += 10.0
        predictor.requested(PredictorRequest(0, document(turn % 6) + question(turn)), now_s)
    guesses = predictor.guesses(now_s, 12.0, 10)  # that of document 5 came last: 0 is next
    assert guesses[0].key == document(0)[-1]
    assert guesses[0].blocks == 10
    assert guesses[0].probability > 0.6
    assert guesses[0].due_s == pytest.approx(now_s + 10.0, abs=2.0)
    assert all(each.probability < 0.3 for each in guesses[1:])
    soon = predictor.guesses(now_s, 65.0, 10)
    assert {each.key for each in soon if each.probability > 0.5} == {document(number)[-1] for number in range(6)}


def test_a_document_is_known_without_its_question() -> None:
    predictor = Markov()
    for turn in range(4):
        predictor.requested(PredictorRequest(0, document(1, 11) + question(turn)), 5.0 * turn)
    assert [each.key for each in predictor.guesses(16.0, 30.0, 1)] == [document(1, 11)[-1]]


def test_prompts_asked_for_once_are_not_foreseen() -> None:
    predictor = Markov()
    for turn in range(50):
        predictor.requested(PredictorRequest(0, document(turn)), float(turn))
    assert predictor.guesses(50.0, 60.0, 10) == []


def test_longer_contexts_decide_where_shorter_ones_cannot() -> None:
    successors = Successors(100)
    history: tuple[int, ...] = ()
    for symbol in (1, 2, 3, 1, 4, 5) * 20:  # what follows 1 depends on what came before it
        successors.came(history, symbol, 2.0)
        history = (*history, symbol)[-3:]
    best = {path: max(successors.next(path), key=lambda each: each.chance) for path in ((4, 5, 1), (2, 3, 1))}
    assert (best[4, 5, 1].symbol, best[2, 3, 1].symbol) == (2, 4)
    assert all(each.chance > 0.8 for each in best.values())
    assert best[4, 5, 1].gap_s == pytest.approx(2.0)
    for path in best:
        assert sum(each.chance for each in successors.next(path)) <= 1.0
    ahead = {each.symbol: each.gap_s for each in successors.ahead((4, 5, 1), 7.0)}
    assert ahead[2] == pytest.approx(2.0)
    assert ahead[3] == pytest.approx(4.0)


def test_memory_is_bounded() -> None:
    predictor, successors = Markov(documents_max=16), Successors(10)
    for turn in range(600):
        predictor.requested(PredictorRequest(turn % 7, document(turn // 2 % 250)), float(turn))
        predictor.requested(PredictorRequest(turn % 7, document(turn // 2 % 250)), float(turn))
        successors.came((turn,), turn + 1, 1.0)
    assert len(successors) <= 11
    state: dict[str, int] = {}
    for name, piece in predictor.export_state():
        state[name] = state.get(name, 0) + len(piece)
    assert state["documents"] <= 16
    assert state["marks"] <= 65


def test_generations_keep_what_was_set_last() -> None:
    known = Generations[int, int](8)
    for number in range(20):
        known[number] = number * number
        known[0] = 0
    assert len(known) <= 9
    assert 0 in known
    assert known.get(19) == 361
    assert known.get(2) is None
    assert known.pop(19) == 361
    assert known.pop(19) is None
    assert dict(known.items())[0] == 0
