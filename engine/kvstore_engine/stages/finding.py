"""What the daemon has of a prompt for one stage: its layers' K/V, and the hidden states at its first layer.

Owns the questions. A store that cannot be reached, or does not answer in time, has nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.restore.session import KvSession, Tokens
from kvstore_engine.stages.stores import StageStore

ABSENT = "absent"
_DEADLINE_S = 0.25


@dataclass(frozen=True, slots=True)
class Found:
    """The tier of each chunk's K/V and of its input, "absent" where there is none; always so for the first stage's
    inputs. `load_s`: for each tier the seconds that the daemon expects of loading a chunk's K/V.
    """

    kv: tuple[str, ...]
    inputs: tuple[str, ...]
    load_s: Mapping[str, float] = field(default_factory=dict)


def look_up(store: StageStore, tokens: Tokens) -> Found:
    """What `store` has of the whole chunks of `tokens`."""
    kv, load_s = _tiers(store.kv, tokens)
    inputs, _ = _tiers(store.inputs, tokens)
    return Found(kv, inputs, load_s)


def leading(tiers: tuple[str, ...]) -> int:
    """How many chunks are stored before the first that is not."""
    return next((at for at, tier in enumerate(tiers) if tier == ABSENT), len(tiers))


def _tiers(session: KvSession | None, tokens: Tokens) -> tuple[tuple[str, ...], dict[str, float]]:
    """Where each chunk of `tokens` is, and what loading one from each tier is expected to take."""
    chunks = len(tokens) // BLOCK_TOKENS
    tiers: tuple[str, ...] = ()
    seconds: dict[str, list[float]] = {}
    if chunks and session is not None and session.state == "connected":
        try:
            answer = session.lookup(tokens, deadline_s=_DEADLINE_S)
            tiers = answer.tiers
            for tier, load_s in zip(answer.tiers, answer.load_s, strict=False):
                seconds.setdefault(tier, []).append(load_s)
        except Exception:  # what cannot be looked up is computed
            tiers = ()
    means = {tier: sum(each) / len(each) for tier, each in seconds.items()}
    return (tiers + (ABSENT,) * chunks)[:chunks], means
