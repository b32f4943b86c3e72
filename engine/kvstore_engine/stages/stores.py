"""Where a stage's state is stored: the K/V of its layers, and the hidden states from which it computes.

Owns the fingerprints. K/V of a stage are a shard: other cuts of the model do not find them. Hidden states belong to the
layer that they are the input of, so stages that begin there share them, in any number of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore_engine.restore.session import KvSession
from kvstore_proto.fingerprint import Fingerprint

HIDDEN_BYTES = 4  # float32, as they pass between stages: what is restored has the bits of what was computed
_HIDDEN_LAYOUT = "hidden-states-f32/token-major"


@dataclass(frozen=True, slots=True)
class StageStore:
    """Sessions for a stage's K/V and for its inputs, of the same block size; None: nothing is stored there."""

    kv: KvSession | None = None
    inputs: KvSession | None = None


def stage_fingerprints(
    whole: Fingerprint, layers: Sequence[range], width: int
) -> list[tuple[Fingerprint, Fingerprint | None]]:
    """For each stage the fingerprints of its K/V and of its inputs, which the first stage has not. `whole` is that of
    the model in one piece, `width` the number of values of a hidden state.
    """
    (group,) = whole.groups
    count = len(layers)
    found: list[tuple[Fingerprint, Fingerprint | None]] = []
    for number, own in enumerate(layers):
        kv = replace(whole, shard_index=number, shard_count=count, groups=(replace(group, layers=tuple(own)),))
        states = replace(group, layers=(own.start,), bytes_per_token_per_layer=HIDDEN_BYTES * width)
        found.append((kv, replace(whole, layout=_HIDDEN_LAYOUT, groups=(states,)) if number else None))
    return found
