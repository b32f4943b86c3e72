"""An orchestrator's expectations of a request's chain: the actions in its `kv_hints`, which vLLM 0.33 carries.

The module owns the types of action that this connector understands. vLLM defines the envelope and no action: the
orchestrator and the connector agree on their meaning. Actions of other kinds are counted and ignored. The module reads
by attribute and imports nothing of vLLM; a vLLM whose requests have no such field works too. A bad hint raises nothing;
only the hint is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore_client.requests import MAX_DUE_S, NextStep

PREFETCH, PAUSE, END = "kvstored.prefetch", "kvstored.session_pause", "kvstored.session_end"
VERSION = "1"  # of each of them
_STEPS: Final[Mapping[Any, NextStep]] = {"tool_call": "tool_call", "end_of_turn": "end_of_turn"}


@dataclass(frozen=True, slots=True)
class HintedChain:
    """A client's expectations for the time after a request. If `wants_prefetch` is True, the blocks of the request's
    chain should be in DRAM `prefetch_in_s` seconds after its end. `next_step` is the engine's next step, and `due_in_s`
    the seconds until the chain is used again. None means not given.
    """

    next_step: NextStep | None = None
    due_in_s: float | None = None
    wants_prefetch: bool = False
    prefetch_in_s: float | None = None


class KvHints:
    """A reader of the `kv_hints` that clients attach to requests. `say` is called once, for the first malformed one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.ignored = 0  # actions of a type or version that is not known here
        self.malformed = 0  # envelopes and actions

    def read(self, envelope: Any) -> HintedChain:
        """Return the expectations in `envelope`, the hints of a request. If `envelope` is None, return an object
        without expectations. If two actions are of one kind, the later one counts.
        """
        step: NextStep | None = None
        due_in_s: float | None = None
        prefetch, prefetch_in_s = False, None
        try:
            actions = () if envelope is None else tuple(envelope.actions)
        except (AttributeError, TypeError):
            self._malformed("an envelope without a list of actions")
            return HintedChain()
        for action in actions:
            try:
                kind, version, payload = action.action_type, action.action_version, action.payload
                if kind not in (PREFETCH, PAUSE, END) or version != VERSION:
                    self.ignored += 1
                elif not isinstance(payload, Mapping):
                    raise ValueError("its payload is no object")
                elif kind == PREFETCH:
                    prefetch_in_s, prefetch = _seconds(payload, "in_s"), True
                elif kind == PAUSE:
                    due_in_s, step = _seconds(payload, "returns_in_s"), _step(payload)
                else:
                    due_in_s, step = None, "closed"
            except (AttributeError, TypeError, ValueError) as error:
                self._malformed(f"action {getattr(action, 'action_type', '')!r:.80}: {error}")
        return HintedChain(step, due_in_s, prefetch, prefetch_in_s)

    def _malformed(self, why: str) -> None:
        self.malformed += 1
        if self.malformed == 1:
            self._say(f"kv_hints that make no sense are passed over, this one and later ones: {why}")


def _seconds(payload: Mapping[str, Any], name: str) -> float | None:
    value = payload.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_DUE_S:
        raise ValueError(f"{name} must be from 0 to {MAX_DUE_S:.0f} seconds")
    return float(value)


def _step(payload: Mapping[str, Any]) -> NextStep | None:
    value = payload.get("next_step")
    if value is not None and value not in _STEPS:
        raise ValueError(f"next_step must be one of {', '.join(_STEPS)}")
    return None if value is None else _STEPS[value]
