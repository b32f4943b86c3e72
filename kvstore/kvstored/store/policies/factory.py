"""Makes policies and admissions by the names in `policy_names.py`. A policy's module is imported when it is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_predictor.base import Array, Piece
from kvstored.policy_names import ADMISSIONS, POLICIES
from kvstored.store.blocks import Residency
from kvstored.store.blocks.rows import as_array
from kvstored.store.policies.admission import Admission
from kvstored.store.policies.base import EvictionPolicy, Learns, Origin, PolicySettings
from kvstored.store.policies.ordered import together
from kvstored.store.policies.queued import Discipline, QueuedPolicy
from kvstored.tier_set import holding


def create(name: str, residency: Residency, tier: int, settings: PolicySettings | None = None) -> EvictionPolicy:
    """Return the policy `name` for the tier at position `tier`. It is notified of the tier's events and knows its
    present blocks. Raises ValueError for an unknown name.
    """
    policy = create_empty(name, residency, tier, settings)
    _adopt(policy)
    residency.listen(tier, policy)
    return policy


def create_empty(name: str, residency: Residency, tier: int, settings: PolicySettings | None = None) -> EvictionPolicy:
    """Return the policy `name` for the tier at position `tier`, without any block and without notifications.

    `name` may also be an address, MODULE:MAKER, of a policy outside this package. Raises ValueError for an unknown
    name, listing the known ones.
    """
    make: Any = _load(name, POLICIES, "policy")
    if inspect.isclass(make) and issubclass(make, Discipline):
        policy: object = QueuedPolicy(residency, tier, settings, name, make)
    else:
        policy = make(residency, tier, settings, name)
    if not isinstance(policy, EvictionPolicy):
        raise RuntimeError(f"{name} is no Policy")
    return policy


def create_admission(name: str, residency: Residency, tier: int, above: EvictionPolicy | None = None) -> Admission:
    """Return the admission `name` for the tier at position `tier`; `above` is the policy of the tier that its blocks
    come from. Raises ValueError for an unknown name, listing the known ones.
    """
    admission = _load(name, ADMISSIONS, "admission")(residency, tier, above)
    if not isinstance(admission, Admission):
        raise RuntimeError(f"{ADMISSIONS[name]} is no Admission")
    return admission


def joined(pieces: Iterable[Piece]) -> dict[str, Array]:
    """Return one array for each name, the pieces with that name joined in order."""
    parts: dict[str, list[Array]] = {}
    for name, piece in pieces:
        parts.setdefault(name, []).append(piece)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def succeed(policy: EvictionPolicy, former: EvictionPolicy, now_ns: int) -> None:
    """Let the new `policy` of a tier continue from what `former`, the tier's policy until now, has learned, if both
    have the same name and learn."""
    if isinstance(policy, Learns) and isinstance(former, Learns) and policy.name == former.name:
        state = joined(former.export_state())
        policy.import_state(state, Origin(np.arange(len(policy.residency.tenants)), 0, now_ns))


def _load(name: str, known: dict[str, str], what: str) -> Callable[..., object]:
    address = known.get(name, name if ":" in name else None)
    if address is None:
        from difflib import get_close_matches  # only for a mistake

        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {name!r}: known are {', '.join(sorted(known))}{hint}")
    module, _, attribute = address.partition(":")
    loaded: Callable[..., object] = getattr(import_module(module), attribute)
    return loaded


def _adopt(policy: EvictionPolicy) -> None:
    """Let a new policy adopt the blocks in its tier, in the order of their last use, children before parents."""
    residency, tier = policy.residency, policy.tier
    rows = np.flatnonzero(holding(np.frombuffer(residency.rows.mask, np.uint8), tier))
    if len(rows):
        here = together(rows)
        last_access_ns = np.frombuffer(residency.rows.last_access_ns, np.uint64)[here]
        depth = as_array(residency.rows.depth)[here]
        order = eviction_order(last_access_ns, depth)
        policy.adopt(order + here.start if isinstance(here, slice) else rows[order])


def eviction_order(last_access_ns: npt.NDArray[np.uint64], depth: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return an array of positions in the two columns (last use and depth of each block), in the order in which the
    blocks should be evicted: by last use, children before parents."""
    if not len(depth):
        return np.empty(0, np.int64)
    height = depth.max() - depth
    if (last_access_ns == last_access_ns[0]).all():  # a start: few small numbers, which are sorted in linear time
        shallow = height.astype(np.uint16) if height.max() <= np.iinfo(np.uint16).max else height
        return np.argsort(shallow, kind="stable")
    return np.lexsort((height, last_access_ns))
