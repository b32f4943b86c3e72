"""The value of hits: the compute they save, their bytes, and money.

Computing n tokens of a prompt costs 2 P n operations in the weights and 2 L H d n² in attention, which looks back at
every earlier position: a block saved deep in a chain is worth more than one at its head. The module decides nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_simulator.simulated_request import SimulatedRequest
from kvstore_simulator.trace import Op, Trace

ELEMENT_BYTES = 2
_GIB = 1 << 30
_PRICE_MAX = 1e24  # operations a second are in there too
DEFAULT_MODEL = "llama-3.1-8b"
_PRICE_KEYS = {"storage_usd_per_gib_hour", "compute_usd_per_hour", "compute_flops_per_s"}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model, by which the computation and the bytes that hits save are counted. `flops(n)` returns the
    floating-point operations to compute the first n tokens of a prompt.
    """

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * ELEMENT_BYTES

    @property
    def weight_bytes(self) -> int:
        return int(self.parameters * ELEMENT_BYTES)

    def flops_of(self, tokens: float) -> float:
        """Return the floating-point operations to compute the first `tokens` tokens of a prompt."""
        return 2.0 * tokens * (self.parameters + self.layers * self.heads * self.head_dim * tokens)

    def flops(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        attention = 2.0 * self.layers * self.heads * self.head_dim
        made: npt.NDArray[np.float64] = 2.0 * self.parameters * tokens + attention * tokens * tokens
        return made


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars for the value of hits: a GiB of the tier for an hour, and an hour of a machine that makes a
    known number of operations a second.
    """

    storage_usd_per_gib_hour: float
    compute_usd_per_hour: float
    compute_flops_per_s: float


@dataclass(frozen=True, slots=True)
class HitValue:
    """The hits of the counted requests and what they saved: the number of blocks that were looked up and that were
    found, and the floating-point operations that the prompts take and that hits saved.
    """

    requests: int
    block_accesses: int
    hits: int
    flops: float
    saved_flops: float

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.block_accesses if self.block_accesses else 0.0

    @property
    def compute_saved_ratio(self) -> float:
        return self.saved_flops / self.flops if self.flops else 0.0


def models() -> dict[str, ModelSize]:
    table = tomllib.loads(resources.files("kvstore_simulator").joinpath("models.toml").read_text())
    return {name: ModelSize(name, **facts) for name, facts in table.items()}


def load_prices(path: Path) -> Prices:
    """Return the prices in the TOML file `path`. Raises OSError, or ValueError with one line."""
    try:
        table = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    if set(table) != _PRICE_KEYS:
        raise ValueError(f"{path}: a price table has the keys {', '.join(sorted(_PRICE_KEYS))} and no others")
    for key, value in table.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _PRICE_MAX:
            raise ValueError(f"{path}: {key} must be a number from 0 to {_PRICE_MAX:.0e}, got {value!r}")
    if not table["compute_flops_per_s"]:
        raise ValueError(f"{path}: compute_flops_per_s must be more than 0")
    return Prices(**{key: float(value) for key, value in table.items()})


def hit_value(trace: Trace, hits: npt.NDArray[np.int64], model: ModelSize, first: int = 0) -> HitValue:
    """Return the value of the hits of a replay of `trace` with `model`. `hits` has for each request the number of
    blocks that were found. Requests before number `first`, and puts, are not counted.
    """
    asked = np.diff(trace.starts)[first:]
    counts = trace.ops[first:] != Op.PUT
    asked, found = asked[counts], hits[first:][counts]
    size = trace.block_tokens
    prompt = trace.input_tokens[first:][counts]
    # The last block of a prompt may be partial: no block is worth more tokens than the prompt has.
    longest = np.where(prompt > 0, prompt, np.iinfo(np.int64).max)
    whole = np.minimum(asked * size, longest).astype(np.float64)
    saved = np.minimum(found * size, longest).astype(np.float64)
    return HitValue(
        len(asked), int(asked.sum()), int(found.sum()), float(model.flops(whole).sum()), float(model.flops(saved).sum())
    )


def served_hit_value(requests: Sequence[SimulatedRequest], block_tokens: int, model: ModelSize) -> HitValue:
    """Return the value of the hits of `requests`, which a simulated node has served. Stored blocks that were computed
    again come after the blocks in the engine's memory; stored blocks that were given up are the last ones.
    """
    columns = [
        (each.blocks, each.tokens, each.in_pool, each.hits, each.recomputed - each.given_up) for each in requests
    ]
    blocks, tokens, in_pool, hits, raced = np.array(columns, np.int64).reshape(-1, 5).T

    def flops_to(ends: npt.NDArray[np.int64]) -> float:
        return float(model.flops(np.minimum(ends * block_tokens, tokens).astype(np.float64)).sum())

    saved = flops_to(hits + raced) - flops_to(in_pool + raced) + flops_to(in_pool)
    return HitValue(len(requests), int(blocks.sum()), int(hits.sum()), flops_to(blocks), saved)


def money(prices: Prices, value: HitValue, capacity_bytes: int, held_bytes: int, hours: float) -> dict[str, float]:
    """Return by name the cost of storing and the value of the saved computation, in US dollars, over the `hours` of a
    trace. The cost is counted once for the whole tier of `capacity_bytes`, and once for the `held_bytes` in use.
    """
    storage, held = (prices.storage_usd_per_gib_hour * nbytes / _GIB * hours for nbytes in (capacity_bytes, held_bytes))
    saved = value.saved_flops / prices.compute_flops_per_s / 3600 * prices.compute_usd_per_hour
    return {
        "storage_usd": storage, "compute_saved_usd": saved, "net_usd": saved - storage,
        "held_usd": held, "net_of_held_usd": saved - held,
    }  # fmt: skip
