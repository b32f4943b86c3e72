"""The fingerprint of a model's state: everything but the tokens that K/V bytes depend on.

Two engines share blocks only if their fingerprints have equal digests; any difference is a miss with a reason. The
module owns the canonical form (sorted compact JSON) and its digest. It reads no model.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import prod
from typing import Any

from kvstore_proto.errors import InvalidValue
from kvstore_proto.identity import HASHES
from kvstore_proto.number_types import NUMBER_TYPES, number_type

GROUP_KINDS = ("full", "sliding", "latent", "recurrent", "items")
MAX_BLOCK_TOKENS = 960  # what fits a block header (kvstore_proto.arena)
MAX_GROUP_ID = 0xFFFF  # two bytes in a block's header
MAX_FINGERPRINT_BYTES = 64 * 1024
MAX_ACCOUNT_CHARACTERS = 64
MAX_WEIGHTS_VERSION = (1 << 53) - 1  # what every JSON parser reads exactly
_SCALARS: dict[str, type] = {"str": str, "int": int}


class FingerprintError(InvalidValue):
    """The error of a fingerprint that cannot be used. The message says which field is wrong, and why."""


@dataclass(frozen=True)
class StatePart:
    """One tensor of the state that a layer keeps, such as K or V. `shape` is the shape of one token's numbers, as in
    ("k", "bf16", (heads, width)). In a recurrent group, which keeps one state for a block, it is the shape of the
    state. `dtype` is a name of `kvstore_proto.number_types`; a tensor without plain numbers is "u8", counted in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of this tensor for one token, or for one state in a recurrent group."""
        kind = number_type(self.dtype)
        return prod(self.shape) * kind.nbytes if kind is not None else 0


@dataclass(frozen=True)
class LayerGroup:
    """A group of a model's layers whose state is stored and looked up together, under the number `group_id`.

    `kind` says what a resume at a boundary between two blocks needs: "full" (K and V) and "latent" (a compressed pair,
    and what indexes it) every block before it; "sliding" the blocks with the last `window_tokens` - 1 positions before
    it; "recurrent" the last block alone, whose payload is the state at its end. The blocks of "items" continue none:
    each key is made from the root and the block's own tokens, so any of them can be put or leased in one call.

    The size of a layer's state is given in one of two ways: `parts` has the size of each part, stored one after the
    other; or, if K and V have one size, `bytes_per_token_per_layer` has the bytes of both. If `heads`,
    the number of K/V heads in each layer, is given too, arrays have an axis of heads.
    """

    group_id: int
    kind: str = "full"
    window_tokens: int = 0
    layers: tuple[int, ...] = ()
    bytes_per_token_per_layer: int = 0
    heads: int = 0
    parts: tuple[StatePart, ...] = ()

    @property
    def may_have_gaps(self) -> bool:
        """True if a chain of its blocks is of use without some of them."""
        return self.kind in ("sliding", "recurrent")

    def window_blocks(self, block_tokens: int) -> int:
        """Return how many blocks before a boundary (the end of a block) are needed to resume there: the blocks with the
        last positions of a sliding window, or one block in a recurrent group. Return 0 for a group that needs all
        blocks. A block has `block_tokens` tokens.
        """
        if self.kind == "sliding":
            return -(-(self.window_tokens - 1) // block_tokens)
        return int(self.kind == "recurrent")

    def needed_blocks(self, boundary_blocks: int, block_tokens: int) -> range:
        """Return the numbers of the blocks of this group that must be loaded to resume after the first
        `boundary_blocks` blocks of a prefix. A block has `block_tokens` tokens.
        """
        window = self.window_blocks(block_tokens) or boundary_blocks
        return range(max(boundary_blocks - window, 0), boundary_blocks)

    def layer_bytes(self, block_tokens: int) -> int:
        """Return the bytes of one layer in the payload of a block of `block_tokens` tokens. Return 0 if the group
        leaves the size open.
        """
        of_each = sum(part.nbytes for part in self.parts) or self.bytes_per_token_per_layer
        return of_each if self.kind == "recurrent" else of_each * block_tokens

    def split(self, ranges: int) -> tuple[LayerGroup, ...]:
        """Split this group into `ranges` groups of consecutive layers, of nearly equal size, and return them; their
        numbers begin at `group_id`. Each has its own blocks, so an engine can load and use one range before the
        next. Raises FingerprintError for more ranges than layers.
        """
        count = len(self.layers)
        if not 1 <= ranges <= count:
            raise FingerprintError(f"group {self.group_id} has {count} layers: 1..{count} ranges, got {ranges}")
        bounds = [count * number // ranges for number in range(ranges + 1)]
        return tuple(
            replace(self, group_id=self.group_id + number, layers=self.layers[bounds[number] : bounds[number + 1]])
            for number in range(ranges)
        )


@dataclass(frozen=True)
class Fingerprint:
    """A description of everything, except tokens, that the bytes of stored K/V state depend on. Two engines share
    blocks only if their fingerprints have equal digests. `layout` names the order of bytes in a payload; the default is
    the order of the project's engine. `account` names a user of an engine that serves several users as one tenant.
    Blocks of two accounts are never shared. `weights` names weights that a trainer changes in place, and
    `weights_version` is the version with which the engine computes; blocks of two versions are never shared.
    """

    model_name: str
    weights_digest: str
    rope: str = ""
    kv_dtype: str = "f16"
    layout: str = "layer-major/k-then-v/token-major"
    tokenizer_digest: str = ""
    adapter_digest: str = ""
    shard_index: int = 0
    shard_count: int = 1
    block_tokens: int = 64
    engine_block_tokens: int = 16
    key_hash: str = "xxh3"
    groups: tuple[LayerGroup, ...] = field(default=(LayerGroup(0),))
    account: str = ""
    weights: str = ""
    weights_version: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def canonical(self) -> bytes:
        """Return the fingerprint as compact JSON with sorted keys. A client sends these bytes in the handshake."""
        return _compact(self._fields())

    def digest(self) -> bytes:
        """Return the 32-byte digest that identifies this fingerprint. `model_name` is a label for people and does not
        change the digest.
        """
        identity = self._fields()
        del identity["model_name"]
        return hashlib.blake2b(_compact(identity), digest_size=32, person=b"kvstore.v1 fp").digest()

    def _fields(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("account", "weights", "weights_version"):  # what is stored without them keeps its digest
            if not found[name]:
                del found[name]
        for group in found["groups"]:
            for name in ("heads", "parts"):
                if not group[name]:
                    del group[name]
        return found

    def group(self, group_id: int) -> LayerGroup | None:
        for group in self.groups:
            if group.group_id == group_id:
                return group
        return None

    def payload_bytes(self, group_id: int = 0) -> int:
        """Return the payload bytes of one block of the layer group `group_id`. Return 0 if the fingerprint leaves the
        size open. Raises FingerprintError if there is no such group.
        """
        group = self.group(group_id)
        if group is None:
            raise FingerprintError(f"no layer group {group_id}; groups are {[g.group_id for g in self.groups]}")
        return len(group.layers) * group.layer_bytes(self.block_tokens)


def _compact(whole: dict[str, Any]) -> bytes:
    return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def is_account(name: str) -> bool:
    """Return whether `name` can be the account of a fingerprint: 1 to 64 printable characters."""
    return 0 < len(name) <= MAX_ACCOUNT_CHARACTERS and name.isprintable()


def _check(fp: Fingerprint) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise FingerprintError(message)

    _check_values(fp)
    for each in fp.groups:
        _check_values(each)
    need(bool(fp.weights_digest), "weights_digest is empty: blocks of two models would be confused")
    need(
        not fp.account or is_account(fp.account),
        f"account {fp.account!r} must be at most {MAX_ACCOUNT_CHARACTERS} characters that can be printed",
    )
    need(not fp.weights or is_account(fp.weights), f"weights {fp.weights!r} must be up to 64 printable characters")
    need(
        bool(fp.weights) == (fp.weights_version > 0) and 0 <= fp.weights_version <= MAX_WEIGHTS_VERSION,
        f"weights_version is from 1 to {MAX_WEIGHTS_VERSION} where weights has a name, and 0 elsewhere, got "
        f"{fp.weights_version}",
    )
    need(fp.key_hash in HASHES, f"key_hash {fp.key_hash!r} is unknown; known: {', '.join(HASHES)}")
    need(
        1 <= fp.block_tokens <= MAX_BLOCK_TOKENS,
        f"block_tokens must be 1..{MAX_BLOCK_TOKENS}, got {fp.block_tokens}",
    )
    need(
        fp.engine_block_tokens >= 1 and fp.block_tokens % fp.engine_block_tokens == 0,
        f"block_tokens ({fp.block_tokens}) must be a multiple of engine_block_tokens ({fp.engine_block_tokens})",
    )
    need(
        0 <= fp.shard_index < fp.shard_count,
        f"shard_index {fp.shard_index} is not below shard_count {fp.shard_count}",
    )
    need(1 <= len(fp.groups) <= 64, f"1..64 layer groups, got {len(fp.groups)}")
    ids = [group.group_id for group in fp.groups]
    need(len(set(ids)) == len(ids), f"layer group ids repeat: {ids}")
    for group in fp.groups:
        if wrong := _mistake(group):
            raise FingerprintError(f"group {group.group_id}: {wrong}")


def _mistake(group: LayerGroup) -> str:
    """Return what is wrong with a layer group; "" if nothing is."""
    sizes = (group.window_tokens, group.bytes_per_token_per_layer, group.heads)
    names = [part.name for part in group.parts]
    unknown = next((part.dtype for part in group.parts if number_type(part.dtype) is None), None)
    wrong = {
        f"kind {group.kind!r} is unknown; known: {', '.join(GROUP_KINDS)}": group.kind not in GROUP_KINDS,
        f"ids must be 0..{MAX_GROUP_ID}, sizes must not be negative": not 0 <= group.group_id <= MAX_GROUP_ID
        or min(sizes) < 0,
        f"a sliding window must have 2 tokens or more, got {group.window_tokens}": group.kind == "sliding"
        and group.window_tokens < 2,
        f"a group of kind {group.kind} has no window_tokens": group.kind != "sliding" and group.window_tokens != 0,
        "a recurrent group has one state a block and no bytes a token: say its sizes by parts": group.kind
        == "recurrent"
        and group.bytes_per_token_per_layer != 0,
        "sizes are said by parts or by bytes_per_token_per_layer, not by both": bool(group.parts)
        and sum(sizes[1:]) != 0,
        f"names of parts repeat or are empty: {names}": len({*names, ""}) != len(names) + 1,
        f"dtype {unknown!r} is unknown; known: {', '.join(NUMBER_TYPES)}": unknown is not None,
        "the numbers in the shape of a part must be more than 0": any(min(p.shape, default=0) < 1 for p in group.parts),
    }
    return next((message for message, is_wrong in wrong.items() if is_wrong), "")


def _check_values(record: Fingerprint | LayerGroup | StatePart) -> None:
    """Raise FingerprintError unless each field has a value of its own type, so that two different records never have
    one canonical form.
    """
    for item in fields(record):
        value, wanted = getattr(record, item.name), _SCALARS.get(str(item.type))
        if wanted is not None:
            _check_scalar(item.name, value, wanted)
        elif not isinstance(value, (tuple, list)):
            raise FingerprintError(f"{item.name} must be a tuple, got {type(value).__name__}")
    if isinstance(record, StatePart):
        for size in record.shape:
            _check_scalar("wrong shape: a size of a part", size, int)
    elif isinstance(record, LayerGroup):
        for layer in record.layers:
            _check_scalar("wrong shape: a layer's number", layer, int)
        if not all(isinstance(part, StatePart) for part in record.parts):
            raise FingerprintError("parts must be a tuple of StatePart")
        for part in record.parts:
            _check_values(part)
    elif not all(isinstance(group, LayerGroup) for group in record.groups):
        raise FingerprintError("groups must be a tuple of LayerGroup")


def _check_scalar(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise FingerprintError(f"{name} must be {wanted.__name__}, got {type(value).__name__}")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise FingerprintError(f"{name} has half a character: two texts would be written alike")


def parse_fingerprint(canonical: bytes) -> Fingerprint:
    """Return the fingerprint whose `Fingerprint.canonical` bytes are `canonical`. Raises FingerprintError, which says
    what is wrong with them.
    """
    if len(canonical) > MAX_FINGERPRINT_BYTES:
        raise FingerprintError(f"fingerprint of {len(canonical)} bytes is over {MAX_FINGERPRINT_BYTES}")
    try:
        raw = json.loads(canonical)
        json.dumps(raw, ensure_ascii=False).encode()  # JSON can say half a character, which no message can carry
    except (ValueError, RecursionError) as error:
        raise FingerprintError(f"fingerprint is not JSON in UTF-8: {error}") from None
    try:
        whole = _typed(Fingerprint, raw, "groups")
        whole["groups"] = tuple(_parse_group(group) for group in whole["groups"])
        return Fingerprint(**whole)
    except FingerprintError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise FingerprintError(f"fingerprint has a wrong shape: {error}") from None


def _parse_group(raw: Any) -> LayerGroup:
    group = _typed(LayerGroup, raw, "layers")
    group["layers"] = tuple(group["layers"])
    parts = [_typed(StatePart, part, "shape") for part in group.get("parts", ())]
    group["parts"] = tuple(StatePart(**part | {"shape": tuple(part["shape"])}) for part in parts)
    return LayerGroup(**group)


def _typed(kind: type, raw: Any, needed: str) -> dict[str, Any]:
    """Return the fields of the JSON object `raw` for a `kind`. Raises FingerprintError for an unknown field or a
    missing one.
    """
    names = {Fingerprint: "it", LayerGroup: "a layer group", StatePart: "a part of a state"}
    what = f"fingerprint has a wrong shape: {names[kind]}"
    if not isinstance(raw, dict):
        raise FingerprintError(f"{what} must be a JSON object, got {type(raw).__name__}")
    declared = {item.name: item.type for item in fields(kind)}
    required = [item.name for item in fields(kind) if item.default is item.default_factory is MISSING]
    for name in (*required, needed):
        if name not in raw:
            raise FingerprintError(f"{what} has no field {name!r}")
    for name in raw:
        if name not in declared:
            raise FingerprintError(f"{what} has a field {name!r} that is not known; known: {', '.join(declared)}")
    for name, value in raw.items():
        wanted = _SCALARS.get(str(declared.get(name)))
        if wanted is not None:
            _check_scalar(name, value, wanted)
    return dict(raw)
