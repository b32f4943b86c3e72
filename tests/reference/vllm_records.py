"""Stand-ins for what vLLM hands to the connector's two halves, and a store in memory with a session's face.

Owns plain records with the attributes that are read, and blocks by their keys. Never does: schedule anything, or share
code with the connector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvstore_client.receipt import FAILED, PRESENT, STORED, PutReceipt
from kvstore_client.results import Lookup
from kvstore_connectors.vllm.groups import StateGroups, state_groups
from kvstore_proto.identity import BlockKeys, block_keys

Bytes = npt.NDArray[np.uint8]
BLOCK_TOKENS = 4
ROOT = b"root of a tenant"


def request(name: str, tokens: Sequence[int], **fields: Any) -> Any:
    """A vllm.v1.request.Request, as far as the connector reads it."""
    plain: dict[str, Any] = {
        "request_id": name,
        "all_token_ids": list(tokens),
        "prompt_token_ids": list(tokens),
        "num_tokens": len(tokens),
        "num_output_tokens": 0,
        "status": SimpleNamespace(name="FINISHED_STOPPED"),
        "num_preemptions": 0,
        "num_computed_tokens": 0,
        "skip_reading_prefix_cache": False,
        "prompt_embeds": None,
        "resumable": False,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**(plain | fields))


def image(digest: str, first_token: int, tokens: int) -> Any:
    return SimpleNamespace(identifier=digest, mm_position=SimpleNamespace(offset=first_token, length=tokens))


def group_spec(name: str, **fields: Any) -> Any:
    """A specification of a class of vLLM's of this name."""
    return type(name, (SimpleNamespace,), {})(**({"block_size": BLOCK_TOKENS, "page_size_bytes": 4} | fields))


def groups_of(*specs: Any) -> StateGroups:
    """The groups of an engine with one layer for each of these specifications."""
    found = [SimpleNamespace(kv_cache_spec=each, layer_names=[f"layer.{at}"]) for at, each in enumerate(specs)]
    return state_groups(SimpleNamespace(kv_cache_groups=found))


def plain_groups() -> StateGroups:
    return groups_of(group_spec("FullAttentionSpec"))


@dataclass
class Step:
    """Builds one SchedulerOutput: `new` and `running` map a request's name to (computed before, scheduled now)."""

    new: dict[str, tuple[int, int]] = field(default_factory=dict)
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    guessed: dict[str, list[int]] = field(default_factory=dict)

    def output(self) -> Any:
        both = self.new | self.running
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=computed) for name, (computed, _) in self.new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(self.running), num_computed_tokens=[computed for computed, _ in self.running.values()]
            ),
            num_scheduled_tokens={name: scheduled for name, (_, scheduled) in both.items()},
            scheduled_spec_decode_tokens=self.guessed,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (self.tables[name],)),
        )


class HeldBlocks:
    def __init__(self, payloads: Sequence[Bytes], valid: bool) -> None:
        self._payloads, self._valid = payloads, valid
        self.released = False

    @property
    def valid(self) -> bool:
        return self._valid and not self.released

    def __len__(self) -> int:
        return len(self._payloads)

    def payload(self, block: int) -> Bytes:
        assert not self.released, "read after release"
        return self._payloads[block]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.released = True


@dataclass
class KeyedStore:
    """A session over a dict. `connected=False`: degraded. `before_fill` runs before each payload is written."""

    block_bytes: int = 8
    block_tokens: int = BLOCK_TOKENS
    connected: bool = True
    leases_hold: bool = True
    tier: str = "host"
    fail_with: Exception | None = None
    before_fill: Callable[[], None] = lambda: None
    bytes_of: dict[int, int] = field(default_factory=dict)  # of groups whose blocks have another size
    blocks: dict[bytes, Bytes] = field(default_factory=dict)
    lookups: int = 0
    finished: threading.Event = field(default_factory=threading.Event)

    def keys(self, tokens: Any, group: int = 0) -> BlockKeys | None:
        if not self.connected:
            return None
        return block_keys(
            ROOT + bytes(group), tokens, block_tokens=self.block_tokens, engine_block_tokens=self.block_tokens,
            hash_name="blake2b",
        )  # fmt: skip

    def lookup(
        self, tokens: Any = None, *, keys: BlockKeys | None = None, group: int = 0, deadline_s: float | None = None
    ) -> Lookup:
        self.lookups += 1
        assert deadline_s is not None and deadline_s > 0
        if not self.connected:
            return Lookup(reason="no_daemon")
        named = self._named(tokens, keys, group)
        blocks = self._leading(named)
        tiers = tuple(self.tier if key in self.blocks else "absent" for key in named)
        return Lookup(blocks, blocks * self.block_tokens, tiers)

    def get(
        self,
        tokens: Any = None,
        *,
        keys: BlockKeys | None = None,
        max_blocks: int | None = None,
        group: int = 0,
        deadline_s: float | None = None,
    ) -> HeldBlocks:
        if self.fail_with is not None:
            raise self.fail_with
        named = self._named(tokens, keys, group)
        count = min(self._leading(named), len(named) if max_blocks is None else max_blocks)
        return HeldBlocks([self.blocks[key] for key in list(named)[:count]], self.leases_hold)

    def put(
        self,
        tokens: Any = None,
        *,
        payloads: Sequence[Callable[[Bytes], None]],
        keys: BlockKeys | None = None,
        first_block: int = 0,
        group: int = 0,
        payload_bytes: int | None = None,
        deadline_s: float = 5.0,
    ) -> PutReceipt:
        try:
            if self.fail_with is not None:
                raise self.fail_with
            size = self.bytes_of.get(group, self.block_bytes)
            assert payload_bytes == size
            named = list(self._named(tokens, keys, group))
            receipt = PutReceipt(len(payloads))
            for index, fill in enumerate(payloads):
                key = named[first_block + index]
                if not group and first_block + index and named[first_block + index - 1] not in self.blocks:
                    receipt.statuses[index] = FAILED
                elif key in self.blocks:
                    receipt.statuses[index] = PRESENT
                else:
                    self.before_fill()
                    payload = np.zeros(size, np.uint8)
                    fill(payload)
                    self.blocks[key] = payload
                    receipt.statuses[index] = STORED
            return receipt
        finally:
            self.finished.set()

    def _named(self, tokens: Any, keys: BlockKeys | None, group: int = 0) -> BlockKeys:
        assert (tokens is None) != (keys is None)
        named = keys if tokens is None else self.keys(tokens, group)
        assert named is not None
        return named

    def _leading(self, keys: BlockKeys) -> int:
        return next((index for index, key in enumerate(keys) if key not in self.blocks), len(keys))
