"""A caller sees of an answer text, stop strings, log probabilities, constraints, and an end in every case."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.batching.answer import Answer, StopStrings, log_probabilities
from kvstore_engine.batching.events import Finished, Token
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.errors import UsageError
from kvstore_engine.tokenizer.tokenizer import StreamingDetokenizer
from tests.reference.batch_runs import Outcome, check, request, run, twin_engine
from tests.reference.block_invariants import check_blocks
from tests.reference.examples import quick_are
from tests.reference.twin_compute import answer_alone, text_of

_PROMPT = list(range(40))


def _first_end(text: str, stops: list[str]) -> int | None:
    """Return where the first stop string to be complete begins; of several complete at once the longest."""
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(ends)[1] if ends else None


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_no_stop_string_is_ever_shown_nor_a_part_of_one(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, stopped = StopStrings(tuple(stops)), "", False
    for index, piece in enumerate(pieces):
        text, stopped = matcher.push(piece)
        shown += text
        so_far = "".join(pieces[: index + 1])
        end = _first_end(so_far, stops)
        assert stopped == (end is not None)
        if stopped:
            assert shown == so_far[:end]
            break
        assert so_far.startswith(shown)
        for stop in stops:
            for size in range(1, len(stop)):
                assert not so_far.endswith(stop[:size]) or len(shown) <= len(so_far) - size
    if not stopped:
        assert shown + matcher.finish() == "".join(pieces)


def test_a_stop_string_ends_an_answer_before_itself() -> None:
    tokens = answer_alone(_PROMPT, 40)
    text = text_of(tokens)
    stop = text[10:13]
    engine = twin_engine()
    engine.add(request("stops", _PROMPT, 40, stop=(stop, "never there")))
    outcome = run(engine)
    finished = outcome.finished["stops", 0]
    assert finished.reason == "stop"
    assert outcome.text["stops", 0] == text[: text.index(stop)]
    assert finished.usage.generated_tokens == text.index(stop) + 3


def test_text_held_back_comes_with_the_end() -> None:
    text = text_of(answer_alone(_PROMPT, 12))
    engine = twin_engine()
    engine.add(request("held", _PROMPT, 12, stop=(text[-2:] + "never",)))
    outcome = run(engine)
    assert outcome.text["held", 0] == text
    assert outcome.finished["held", 0].text == text[-2:]
    assert outcome.finished["held", 0].reason == "length"


def test_an_end_token_ends_and_is_not_part_of_the_answer() -> None:
    tokens = answer_alone(_PROMPT, 40)
    end = tokens[17]
    expected = tokens[: tokens.index(end)]
    engine = twin_engine(end_ids=frozenset([end]))
    engine.add(request("ends", _PROMPT, 40, ignore_end=False))
    engine.add(request("goes on", _PROMPT, 40, ignore_end=True))
    outcome = run(engine)
    assert outcome.tokens["ends", 0] == expected
    assert outcome.finished["ends", 0].reason == "end"
    assert outcome.finished["ends", 0].usage.generated_tokens == len(expected)
    assert outcome.tokens["goes on", 0] == tokens


def test_log_probabilities_are_the_models_own() -> None:
    engine = twin_engine()
    engine.add(request("logs", _PROMPT, 5, logprobs=3))
    tokens = [event for event in run(engine).events if isinstance(event, Token)]
    for event in tokens:
        assert event.logprob is not None and len(event.top) == 3
        assert event.top[0] == (event.token, event.logprob)  # greedy
        assert event.top[0][1] >= event.top[1][1] >= event.top[2][1]
    row = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    logprob, top = log_probabilities(row, 2, 4)
    assert [token for token, _ in top] == [1, 3, 2, 0]
    assert sum(np.exp(value) for _, value in top) == pytest.approx(1.0)
    assert logprob == top[2][1]
    assert log_probabilities(row, 0, 0)[1] == ()


class _Alternates:
    """Allows even and odd tokens in turns, and ends after `count`."""

    def __init__(self, count: int) -> None:
        self.accepted: list[int] = []
        self._count = count

    @property
    def finished(self) -> bool:
        return len(self.accepted) == self._count

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.full(2, 0x55555555 if len(self.accepted) % 2 == 0 else 0xAAAAAAAA, np.uint32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_a_constraint_chooses_among_what_it_allows() -> None:
    made: list[_Alternates] = []

    def make() -> _Alternates:
        made.append(_Alternates(9))
        return made[-1]

    engine = twin_engine()
    engine.add(request("bound", _PROMPT, 40, n=2, constraint=make))
    engine.add(request("free", _PROMPT, 9))
    outcome = run(engine)
    for index in range(2):
        tokens = outcome.tokens["bound", index]
        assert [token % 2 for token in tokens] == [0, 1] * 4 + [0]
        assert made[index].accepted == tokens
        assert outcome.finished["bound", index].reason == "stop"
    assert outcome.tokens["free", 0] == answer_alone(_PROMPT, 9)


class _Forbids:
    finished = False

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.zeros(2, np.uint32)

    def accept(self, token: int) -> None:
        raise AssertionError


def test_an_answer_that_cannot_go_on_fails_alone() -> None:
    engine = twin_engine()
    engine.add(request("stuck", _PROMPT, 5, constraint=_Forbids))
    engine.add(request("fine", _PROMPT, 5))
    outcome = run(engine)
    assert outcome.finished["stuck", 0].reason == "failed"
    assert "allows no token" in outcome.finished["stuck", 0].message
    assert outcome.tokens["fine", 0] == answer_alone(_PROMPT, 5)


class _Raises:
    """Allows all and ends nothing, until it raises at the third call of `where`."""

    finished = False

    def __init__(self, where: str) -> None:
        self._where, self._calls = where, 0

    def mask(self) -> None:
        self._count("mask")

    def accept(self, token: int) -> None:
        self._count("accept")

    def _count(self, where: str) -> None:
        self._calls += where == self._where
        if self._calls == 3 and where == self._where:
            raise ValueError("this constraint is broken")


@pytest.mark.parametrize("where", ["mask", "accept"])
def test_a_constraint_that_raises_fails_its_answer_alone(where: str) -> None:
    engine = twin_engine()
    engine.add(request("broken", _PROMPT, 5, constraint=lambda: _Raises(where)))
    engine.add(request("fine", _PROMPT, 5))
    outcome = run(engine)
    assert outcome.tokens["broken", 0] == answer_alone(_PROMPT, 2)
    assert outcome.finished["broken", 0].reason == "failed"
    assert "this constraint is broken" in outcome.finished["broken", 0].message
    assert outcome.tokens["fine", 0] == answer_alone(_PROMPT, 5)


def test_a_further_answer_whose_constraint_cannot_be_made_fails_alone() -> None:
    made: list[_Raises] = []

    def make() -> _Raises:
        if made:
            raise RuntimeError("only one")
        made.append(_Raises("never"))
        return made[0]

    engine = twin_engine()
    engine.add(request("several", _PROMPT, 5, n=3, constraint=make))
    outcome = run(engine)
    assert outcome.tokens["several", 0] == answer_alone(_PROMPT, 5)
    assert [outcome.finished["several", index].reason for index in range(3)] == ["length", "failed", "failed"]


def test_all_answers_of_a_request_end_though_only_one_has_begun() -> None:
    engine = twin_engine()
    engine.add(request("several", list(range(64)) * 10, 5, n=3))
    engine.step()
    engine.cancel("several")
    with pytest.raises(UsageError, match="under way"):
        engine.add(request("several", _PROMPT))  # its ends would be taken for the new one's
    outcome = run(engine)
    assert [outcome.finished["several", index].reason for index in range(3)] == ["cancelled"] * 3
    engine.add(request("several", _PROMPT, 5))
    assert run(engine).tokens["several", 0] == answer_alone(_PROMPT, 5)


def test_nothing_follows_a_stop_string_not_even_half_a_character() -> None:
    settings = RequestSettings(stop=(".",))
    answer = Answer(settings, 0, _Pieces([b"a \xe2\x82", b"\xac.\xe2\x82"]))
    assert answer.push(0) == ("a ", False)
    assert answer.push(1) == ("\u20ac", True)
    assert answer.finish() == ""


class _Pieces:
    """A tokenizer with these pieces."""

    end_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def stream(self, special: bool = False, continues: bool = False) -> StreamingDetokenizer:
        return StreamingDetokenizer(self._pieces.__getitem__)


class _FullDisk(Observer):
    """Fails in the middle of an answer."""

    def __init__(self) -> None:
        self.notices = 0

    def token(self, request_id: str, index: int, t: float) -> None:
        self.notices += 1
        if self.notices == 3:
            raise OSError("no space left on device")


def test_an_observer_that_raises_costs_no_token(caplog: pytest.LogCaptureFixture) -> None:
    observer = _FullDisk()
    engine = twin_engine(observer=observer)
    for name in ("first", "second"):
        engine.add(request(name, _PROMPT, 5))
    outcome = run(engine)
    assert [outcome.tokens[name, 0] for name in ("first", "second")] == [answer_alone(_PROMPT, 5)] * 2
    assert observer.notices == 3
    assert [record.message for record in caplog.records] == ["observer _FullDisk raised and is notified no longer"]


def test_a_constraint_that_cannot_be_made_refuses_the_request() -> None:
    engine = twin_engine()

    def make() -> Any:
        raise ValueError("no such grammar")

    with pytest.raises(UsageError, match="the constraint cannot be made: no such grammar"):
        engine.add(request("bad", _PROMPT, 5, constraint=make))
    assert not engine.has_work
    engine.add(request("bad", _PROMPT, 5))  # the name is free
    assert run(engine).tokens["bad", 0] == answer_alone(_PROMPT, 5)


@pytest.mark.parametrize("steps", quick_are([0, 1, 3, 8, 30], [True, False, True, False, True]))
def test_a_request_may_be_cancelled_at_any_time(steps: int) -> None:
    """The request is cancelled in the queue, in its prompt, while it answers, while it is swapped out, when it has
    ended.
    """
    engine = twin_engine(24, max_running=6)
    for n in range(12):
        engine.add(request(str(n), [(n + k) % 64 for k in range(40 + n)], 70, n=1 + n % 2))
    outcome = Outcome()
    for _ in range(steps):
        outcome.take(engine.step())
    for n in range(0, 12, 2):
        engine.cancel(str(n))
        engine.cancel(str(n))
        check(engine)
    engine.cancel("unknown")
    run(engine, outcome)
    for n in range(12):
        prompt = [(n + k) % 64 for k in range(40 + n)]
        for index in range(1 + n % 2):
            tokens, finished = outcome.tokens[str(n), index], outcome.finished[str(n), index]
            assert tokens == answer_alone(prompt, len(tokens))
            assert finished.reason == ("length" if n % 2 else "cancelled") and (len(tokens) == 70 or n % 2 == 0)
    assert engine.scheduler.host.used_blocks == 0 and engine.running == engine.waiting == 0
    check_blocks(engine.space, [])


def test_a_swapped_request_may_be_cancelled() -> None:
    engine = twin_engine(24, max_running=6)
    for n in range(8):
        engine.add(request(str(n), [(7 * n + k) % 64 for k in range(60)], 90))
    outcome = Outcome()
    while not engine.scheduler.host.used_blocks:
        outcome.take(engine.step())
    (swapped,) = [sequence for sequence in engine.scheduler.run_queue.waiting if sequence.swapped is not None]
    engine.cancel(swapped.request.id)
    assert engine.scheduler.host.used_blocks == 0
    run(engine, outcome)
    assert outcome.finished[swapped.request.id, 0].usage.preemptions >= 1


def test_usage_accounts_for_every_second_and_token() -> None:
    engine = twin_engine(max_running=1)
    engine.add(request("first", _PROMPT, 10))
    engine.add(request("second", _PROMPT, 10))
    outcome = run(engine)
    first, second = (outcome.finished[name, 0].usage for name in ("first", "second"))
    assert first.queued_s == 0.0 and second.queued_s == pytest.approx(first.total_s)
    for usage in (first, second):
        assert usage.prompt_tokens == 40 == usage.local_tokens + usage.computed_tokens
        assert usage.generated_tokens == 10
        assert usage.queued_s <= usage.ttft_s
        assert usage.ttft_s + 9 * usage.tpot_s == pytest.approx(usage.total_s)
    assert second.local_tokens == 32


def test_the_end_token_is_no_further_token() -> None:
    tokens = answer_alone(_PROMPT, 40)
    end = next(token for index, token in enumerate(tokens) if index > 1 and token not in tokens[:index])
    usages = []
    for limit in (40, tokens.index(end)):
        engine = twin_engine(end_ids=frozenset([end]))
        engine.add(request("", _PROMPT, limit, ignore_end=False))
        usages.append(run(engine).finished["", 0].usage)
    ends, same = usages
    assert ends.generated_tokens == same.generated_tokens > 1
    assert ends.tpot_s == pytest.approx(same.tpot_s, rel=0.01)


def test_every_answer_ends_exactly_once() -> None:
    engine = twin_engine()
    engine.add(request("many", _PROMPT, 6, n=4))
    events = run(engine).events
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"n": 0}, {"n": 65}, {"stop": ("",)}, {"logprobs": -1}, {"logprobs": 1000}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RequestSettings(**wrong)
