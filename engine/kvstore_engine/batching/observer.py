"""The engine's reports to observers: the contract, with a base that does nothing, and `FanOut`.

Times are the engine's clock's, in seconds. The engine's thread calls an observer between steps: the implementation MUST
return at once and MUST NOT raise or call the engine. The engine drops an observer that raises: a full disk under a
trace must not fail an answer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvstore_engine.batching.events import Reason, Usage
from kvstore_engine.restore.record import RestorationRecord, RestoreReport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The tokens of one answer that a step computed: `tokens` tokens from position `position` on. `kind` is "prefill"
    for tokens of the prompt and "decode" for the next token of the answer; `index` numbers the answers of a request.
    """

    request_id: str
    index: int
    kind: Literal["prefill", "decode"]
    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step for observers. The whole step took from `begin_s` to `end_s`, its computing alone
    `compute_s` seconds. `used_blocks` counts pool blocks that running sequences hold, each once; `cached_blocks` counts
    blocks that only the prefix trie (the index of shared prefixes) holds. `budget_tokens` is the most prompt tokens
    that the step was allowed to have. `parts()` lists the tokens of each answer, and may be called only while an
    observer has the record.
    """

    number: int
    begin_s: float
    end_s: float
    compute_s: float
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    budget_tokens: int
    pool_blocks: int
    used_blocks: int
    cached_blocks: int
    parts: Callable[[], tuple[SequencePart, ...]] = tuple


class Observer:
    """A listener whose methods the engine calls at each event. Here they do nothing; subclasses override the methods of
    interest. Times `t`, `begin_s`, `end_s` are seconds of the engine's clock; `index` numbers the answers of a request.
    """

    def queued(self, request_id: str, t: float) -> None:
        """Note that the engine accepted the request `request_id` at the time `t` (seconds)."""

    def admitted(self, request_id: str, index: int, t: float) -> None:
        """Note that answer `index` of a request was given the pool blocks that it needs to run, at the time `t`
        (seconds): for the first time, or again after it had lost them.
        """

    def restored(self, request_id: str, index: int, source: Literal["local", "daemon"], tokens: int, t: float) -> None:
        """Note that the K/V of `tokens` prompt tokens of an answer need not be computed: they came from another
        sequence ("local") or from the daemon, at the time `t` (seconds).
        """

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        """Note that the blocks of a prompt that the daemon had are restored, or that it had none. `report` has the
        figures.
        """

    def restoration(self, record: RestorationRecord) -> None:
        """Note that the restoration of a prompt has ended; `record` has its plan and its result."""

    def step(self, record: StepRecord) -> None:
        """Note that the engine has done a step, which `record` describes."""

    def preempted(self, request_id: str, index: int, how: Literal["swap", "recompute"], t: float) -> None:
        """Note that a running answer lost its pool blocks at the time `t` (seconds). They were copied to host memory
        ("swap"), or their K/V will be computed again ("recompute").
        """

    def swapped_out(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        """Note that the blocks of an answer that had to give them up, `nbytes` bytes in `runs` contiguous pieces of the
        pool, were copied to host memory.
        """

    def swapped_in(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        """Note that the blocks of an answer, `nbytes` bytes, were copied back from host memory to the pool, in `runs`
        contiguous pieces.
        """

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        """Note that a request to store the blocks of `tokens` tokens of an answer in the daemon has ended. An empty
        `reason` means that the daemon stored them; otherwise it says why not.
        """

    def token(self, request_id: str, index: int, t: float) -> None:
        """Note that the next token of an answer was chosen at the time `t`."""

    def finished(self, request_id: str, index: int, reason: Reason, usage: Usage, t: float) -> None:
        """Note that answer `index` of a request has ended for `reason`, with the figures `usage`."""


def _forwarded(name: str) -> Callable[..., None]:
    def forward(self: "FanOut", *event: object, **named: object) -> None:
        self._notify(name, event, named)

    return forward


class FanOut(Observer):
    """An observer that passes every event to each of `observers` in order. An observer that raises is logged and gets
    no further events.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def replace(self, old: Observer, new: Observer) -> None:
        """Pass later events to the observer `new` in place of `old`."""
        self._observers = tuple(new if observer is old else observer for observer in self._observers)

    queued = _forwarded("queued")
    admitted = _forwarded("admitted")
    restored = _forwarded("restored")
    store_answered = _forwarded("store_answered")
    restoration = _forwarded("restoration")
    step = _forwarded("step")
    preempted = _forwarded("preempted")
    swapped_out = _forwarded("swapped_out")
    swapped_in = _forwarded("swapped_in")
    stored = _forwarded("stored")
    token = _forwarded("token")
    finished = _forwarded("finished")

    def _notify(self, name: str, event: tuple[object, ...], named: dict[str, object]) -> None:
        for observer in self._observers:
            try:
                getattr(observer, name)(*event, **named)
            except Exception:
                _log.exception("observer %s raised and is notified no longer", type(observer).__name__)
                self._observers = tuple(other for other in self._observers if other is not observer)
