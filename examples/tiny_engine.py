"""Shows how an engine uses kvstored, whole: restore what is stored, compute the rest, store what is new.

    kvstored serve --socket-dir /tmp/kv --state-dir /tmp/kv/state &
    python examples/tiny_engine.py /tmp/kv        # run it twice: the second run computes only the tail

The model is a toy (each token's K/V row mixes in all rows before it), the use of the store is not.
"""

import sys

import numpy as np

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup

LAYERS, ROW_BYTES, BLOCK_TOKENS = 2, 2 * 64 * 4, 64  # K and V of 64 float32 for each layer and token
FINGERPRINT = Fingerprint(
    model_name="tiny-engine",
    weights_digest="v1",  # all that changes a K/V byte must change the fingerprint: weights, dtype, layout, rope, LoRA
    kv_dtype="f32",
    block_tokens=BLOCK_TOKENS,
    groups=(LayerGroup(0, layers=tuple(range(LAYERS)), bytes_per_token_per_layer=ROW_BYTES),),
)


def prefill(cache: np.ndarray, tokens: np.ndarray, start: int) -> None:
    """Compute the K/V rows [start, len(tokens)) of `cache`, float32 [layers, tokens, 128]."""
    for position in range(start, len(tokens)):
        before = cache[:, :position].sum(axis=1) if position else 0.0
        cache[:, position] = np.cos(tokens[position] * np.arange(1, 129) + before)


def answer(session: kvstore_client.Session, tokens: np.ndarray) -> tuple[int, int]:
    """The next token, and how many tokens of the prompt came from the store."""
    cache = np.zeros((LAYERS, len(tokens), 128), np.float32)
    usable = (len(tokens) - 1) // BLOCK_TOKENS  # the last token is always computed: its output is the answer
    restored = 0
    with session.get(tokens, max_blocks=usable) as lease:  # a miss is an empty lease, never an exception
        for block in range(len(lease)):
            rows = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            for layer in range(LAYERS):
                cache[layer, rows] = lease.layer(block, layer).view(np.float32).reshape(BLOCK_TOKENS, 128)
        if lease.valid:  # checked after the copy: only now is it certain that the bytes did not change meanwhile
            restored = lease.tokens
    prefill(cache, tokens, restored)

    first, full = restored // BLOCK_TOKENS, len(tokens) // BLOCK_TOKENS

    def write(block: int, destination: np.ndarray) -> None:  # straight into shared memory
        rows = cache[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        destination.view(np.float32).reshape(rows.shape)[:] = rows

    payloads = [lambda destination, block=block: write(block, destination) for block in range(first, full)]
    if payloads:
        session.put(tokens, first_block=first, payloads=payloads)
    return int(abs(cache[:, -1].sum()) * 1e6) % 50_000, restored


if __name__ == "__main__":
    prompt = np.arange(1_000, dtype=np.int32) % 97
    with kvstore_client.connect(sys.argv[1] if len(sys.argv) > 1 else None, fingerprint=FINGERPRINT) as store:
        token, restored = answer(store, prompt)
        print(f"next token {token}; {restored} of {len(prompt)} prompt tokens came from the store ({store.state})")
