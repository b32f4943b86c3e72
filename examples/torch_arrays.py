"""Stored K and V as torch tensors, without a copy: attention over a prefix where the store has it.

    kvstored serve --socket-dir /tmp/kv --state-dir /tmp/kv/state &
    python examples/torch_arrays.py /tmp/kv        # pip install '.[torch]'

The numbers are random, the use of the store is not. Run it twice: the second time nothing is stored.
"""

import sys
from functools import partial

import numpy as np
import torch

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, BLOCKS = 2, 4, 32, 64, 8
TOKEN_BYTES = 2 * HEADS * HEAD_DIM * 2  # K and V of bfloat16, in each layer
GROUP = LayerGroup(0, layers=tuple(range(LAYERS)), bytes_per_token_per_layer=TOKEN_BYTES, heads=HEADS)
FINGERPRINT = Fingerprint("torch-arrays", weights_digest="v1", kv_dtype="bf16", groups=(GROUP,))


def write(computed: torch.Tensor, block: int, slot: kvstore_client.Slot) -> None:
    """Copy K and V of one block, of [layer, K or V, token, head, number], into the store's memory."""
    rows = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
    for layer in range(LAYERS):
        torch.from_dlpack(slot.array(layer, kind="k")).copy_(computed[layer, 0, rows])
        torch.from_dlpack(slot.array(layer, kind="v")).copy_(computed[layer, 1, rows])


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    heads_first = (keys.transpose(0, 1), values.transpose(0, 1))
    return torch.nn.functional.scaled_dot_product_attention(query, *heads_first)


if __name__ == "__main__":
    torch.manual_seed(0)
    tokens = np.arange(BLOCKS * BLOCK_TOKENS, dtype=np.int32)
    computed = torch.randn(LAYERS, 2, len(tokens), HEADS, HEAD_DIM).to(torch.bfloat16)
    query = torch.randn(HEADS, 1, HEAD_DIM).to(torch.bfloat16)
    with kvstore_client.connect(sys.argv[1] if len(sys.argv) > 1 else None, fingerprint=FINGERPRINT) as store:
        fill = [kvstore_client.by_arrays(FINGERPRINT, partial(write, computed, block)) for block in range(BLOCKS)]
        stored = store.put(tokens, payloads=fill).stored_blocks
        with store.get(tokens) as lease:  # torch could write to these: on a read-only mapping that ends the process
            keys = [torch.from_dlpack(lease.array(block, 1, kind="k")) for block in range(len(lease))]
            values = [torch.from_dlpack(lease.array(block, 1, kind="v")) for block in range(len(lease))]
            if keys:
                seen = attention(query, torch.cat(keys), torch.cat(values))
                is_equal = torch.equal(seen, attention(query, *computed[1, :, : lease.tokens]))
                print(f"{stored} blocks stored; attention over {lease.tokens} stored tokens is the same: {is_equal}")
            else:
                print(f"nothing is stored ({store.state})")
