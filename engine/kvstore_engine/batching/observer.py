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
    """One sequence's rows of a step: `tokens` rows from `position` on. `kind` "prefill": they belong to its prompt."""

    request_id: str
    index: int
    kind: Literal["prefill", "decode"]
    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step for observers. `begin_s` to `end_s` is the whole step, `compute_s` the forward pass alone.

    used_blocks: engine blocks that running sequences hold (shared ones once). cached_blocks: further blocks that only
    the prefix trie holds. budget_tokens: prompt tokens that the step had room for beside the decodes. parts: makes one
    entry for each answer; call it while the record is passed on.
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
    """An observer that does nothing. Override the methods of interest."""

    def queued(self, request_id: str, t: float) -> None:
        """Note that `add` accepted a request."""

    def admitted(self, request_id: str, index: int, t: float) -> None:
        """Note that a sequence got its blocks, for the first time or after a preemption."""

    def restored(self, request_id: str, index: int, source: Literal["local", "daemon"], tokens: int, t: float) -> None:
        """Note that `tokens` of the prompt need not be computed. Local: at admission, or when another sequence computes
        them.
        """

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        """Note that the daemon has answered and its blocks of the prompt are restored; called once for each request to
        the daemon.
        """

    def restoration(self, record: RestorationRecord) -> None:
        """Note that a restoration has ended: `record` has its plan and its result."""

    def step(self, record: StepRecord) -> None:
        """Note that a step has been done."""

    def preempted(self, request_id: str, index: int, how: Literal["swap", "recompute"], t: float) -> None:
        """Note that a running sequence lost its blocks."""

    def swapped_out(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        """Note that a victim's blocks were copied to the host pool, in `runs` contiguous pieces."""

    def swapped_in(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        """Note that a swapped sequence's blocks were copied back to the pool."""

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        """Note that a put of `tokens` has ended. Empty `reason`: the daemon has them; otherwise why it does not. One
        put at a time.
        """

    def token(self, request_id: str, index: int, t: float) -> None:
        """Note that a token was chosen."""

    def finished(self, request_id: str, index: int, reason: Reason, usage: Usage, t: float) -> None:
        """Note that an answer has ended."""


def _forwarded(name: str) -> Callable[..., None]:
    def forward(self: "FanOut", *event: object, **named: object) -> None:
        self._notify(name, event, named)

    return forward


class FanOut(Observer):
    """Notifies each of `observers`, in this order. An observer that raises is logged and dropped."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def replace(self, old: Observer, new: Observer) -> None:
        """Replace `old` by `new`, from the next event on."""
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
