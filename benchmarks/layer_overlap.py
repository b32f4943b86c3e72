"""Measure how much sooner a first token comes where a prefix is loaded layer by layer beside the model.

Transformers models of 8 layers with random weights, in this process, and a real daemon. The link from shared memory to
the model's tensors is slowed to a rate at which loading the prefix takes as long as computing the tokens behind it.
Two ways take turns: the whole prefix is there before the model begins, or each layer waits for its own bytes. The
logits must be equal to the bit.

    python benchmarks/layer_overlap.py --quick --json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from support.daemon import MIB, bench_daemon
from support.report import AT_LEAST, Row, main, median, progress
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvstore_client import Session
from kvstore_connectors.transformers import KVStoreCache, host_copies, kvstore_session, restore
from kvstore_connectors.transformers.group_blocks import BlocksToRead
from kvstore_connectors.transformers.host_copies import HostTensorCopies

LAYERS, HELD, NEW = 8, 1536, 256  # tokens
COMMON = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    "deepseek_v3": {
        "q_lora_rank": 128, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
        "head_dim": 32, "num_key_value_heads": 8, "first_k_dense_replace": LAYERS, "n_routed_experts": 2,
        "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
    },
}  # fmt: skip


class SlowLink:
    """A link that carries a byte in `s_per_byte` seconds, beside what the copies take by themselves."""

    def __init__(self) -> None:
        self.s_per_byte = 0.0
        self.carried = 0

    def carry(self, nbytes: int) -> None:
        self.carried += nbytes
        time.sleep(nbytes * self.s_per_byte)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let all copies of the connector go over this link."""
        scatter, fill = host_copies.scatter, BlocksToRead.fill

        def scatter_slowly(tensor: torch.Tensor, blocks: Any, span: Any, layers: slice = slice(None)) -> None:
            scatter(tensor, blocks, span, layers)
            part = tensor[layers]
            self.carry(part.nbytes // part.shape[3] * (span.end - span.begin))

        def fill_slowly(reads: BlocksToRead, layer: int) -> None:
            fill(reads, layer)
            self.carry(sum(rows.nbytes for rows in reads.rows[layer]))

        with patch.object(host_copies, "scatter", scatter_slowly), patch.object(BlocksToRead, "fill", fill_slowly):
            yield


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    with bench_daemon(f"host.capacity={512 * MIB}", f"host.staging={64 * MIB}") as daemon:
        return [_overlap(kind, str(daemon.socket_dir), 9 if quick else 15) for kind in MODELS]


def _overlap(kind: str, socket: str, rounds: int) -> Row:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(COMMON | MODELS[kind]))).eval()
    ids = torch.randint(1, 500, (1, HELD + NEW), generator=torch.Generator().manual_seed(1))
    link, taken_s = SlowLink(), {"after": list[float](), "beside": list[float]()}
    with kvstore_session(model, socket, required=True, deadline_s=30.0, staging_bytes=64 * MIB) as session:
        cache = _cache(session, model)
        with torch.no_grad():
            model(ids[:, :HELD], past_key_values=cache, logits_to_keep=1)
        if not cache.flush(60) or cache.report.store_reason:
            raise RuntimeError(f"the prefix was not stored: {cache.report.store_reason}")
        with torch.no_grad(), link.used():
            _, unslowed_s, expected = _turn(session, model, ids, "after")
            for _ in range(3):  # the load apart from the answer's time is what the model computes
                link.carried = 0
                total_s, load_s, _ = _turn(session, model, ids, "after")
                link.s_per_byte = max(total_s - load_s - unslowed_s, 0.01) / link.carried
            for number in range(rounds):
                for way in ("after", "beside") if number % 2 else ("beside", "after"):
                    total_s, _, logits = _turn(session, model, ids, way)
                    if not torch.equal(logits, expected):
                        raise RuntimeError(f"{kind}: the answer {way} the load is another one")
                    taken_s[way].append(total_s)
    after_ms, beside_ms = (median(each) * 1e3 for each in taken_s.values())
    progress(f"{kind}: {after_ms:.0f} ms one after the other, {beside_ms:.0f} ms by layer")
    return Row(f"overlap_{kind}", after_ms, "ms", beside_ms, "ms by layer", AT_LEAST, 1.3)


def _turn(session: Session, model: PreTrainedModel, ids: torch.Tensor, way: str) -> tuple[float, float, torch.Tensor]:
    """Return the seconds that an answer took, and that its load took, and the logits of its last token."""
    least = 0 if way == "beside" else 1 << 60
    cache = _cache(session, model)
    with (
        patch.object(restore, "LEAST_BYTES", least),
        patch.object(HostTensorCopies, "least_beside_bytes", least),
        patch.object(KVStoreCache, "_store", lambda _: None),  # else the next turn would restore this one's tokens
    ):
        began = time.perf_counter()
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        took_s = time.perf_counter() - began
    if cache.report.restored_tokens != HELD:
        raise RuntimeError(f"{cache.report.restored_tokens} of {HELD} tokens restored: {cache.report.reason}")
    return took_s, cache.report.restore_s, logits


def _cache(session: Session, model: PreTrainedModel) -> KVStoreCache:
    return KVStoreCache(session, model, deadline_s=30.0, always_load=True)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
