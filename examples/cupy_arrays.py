"""Stored K and V as CuPy arrays on a GPU: blocks of a GPU tier where they are, others by one copy.

    kvstored serve --socket-dir /tmp/kv --state-dir /tmp/kv/state --set tier.vram.kind=gpu \\
        --set tier.vram.capacity=1GiB --set tier.vram.before_host=true &
    python examples/cupy_arrays.py /tmp/kv        # pip install '.[cuda]', or '.[cuda12]'

Not yet run on hardware.
"""

import sys
from functools import partial
from typing import Any

import numpy as np

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup

LAYERS, HEADS, HEAD_DIM, BLOCKS = 2, 4, 32, 8
GROUP = LayerGroup(0, layers=tuple(range(LAYERS)), bytes_per_token_per_layer=2 * HEADS * HEAD_DIM * 2, heads=HEADS)
FINGERPRINT = Fingerprint("cupy-arrays", weights_digest="v1", kv_dtype="f16", groups=(GROUP,))


def cupy_on_a_device() -> Any:
    """Return CuPy; end with one line where it is not installed or finds no device."""
    try:
        import cupy
    except ImportError:
        sys.exit("this example needs CuPy: pip install '.[cuda]', or '.[cuda12]' for a driver of CUDA 12")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        sys.exit(f"this example needs a CUDA device: {error}")
    return cupy


def write(computed: np.ndarray, block: int, slot: kvstore_client.Slot) -> None:
    """Copy K and V of one block, of [block, K or V, layer, token, head, number], into the store's memory."""
    np.asarray(slot.array(kind="k"))[...] = computed[block, 0]
    np.asarray(slot.array(kind="v"))[...] = computed[block, 1]


if __name__ == "__main__":
    cupy = cupy_on_a_device()
    tokens = np.arange(BLOCKS * FINGERPRINT.block_tokens, dtype=np.int32)
    shape = (BLOCKS, 2, LAYERS, FINGERPRINT.block_tokens, HEADS, HEAD_DIM)
    computed = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    where = sys.argv[1] if len(sys.argv) > 1 else None
    with kvstore_client.connect(where, fingerprint=FINGERPRINT, device=0) as store:
        fill = [kvstore_client.by_arrays(FINGERPRINT, partial(write, computed, block)) for block in range(BLOCKS)]
        store.put(tokens, payloads=fill)
        with store.get(tokens) as lease:
            for block in range(len(lease)):
                array = lease.array(block, kind="k")
                on_device = cupy.asarray(np.asarray(array) if array.device is None else array)
                how = "copied from host memory" if array.device is None else f"on device {array.device} already"
                is_equal = bool((on_device == cupy.asarray(computed[block, 0])).all())
                print(f"block {block}: K {on_device.shape} {how}, equal: {is_equal}")
