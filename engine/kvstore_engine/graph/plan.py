"""The places at which a prompt is cut into steps.

Pure. The rule exists for one promise: a prompt with a restored prefix gives exactly the tokens that it gives without.
Attention rows and the engine's own products (kernels.base) do not depend on the other rows of a step, but ggml's matrix
product may treat the last `n % 4` rows of it with another kernel, which rounds differently. So all steps but the last
have a multiple of `block` tokens, and the last one, the tail, begins at one place whether or not a prefix was restored:
at the last block boundary before the end.
"""

from itertools import pairwise

BLOCK_TOKENS = 64  # the storage block's default
# Short chunks are the faster ones on a CPU: a chunk's activations then stay in the second-level cache,
# while reading the weights once a chunk is nothing against multiplying with them. 135M model, 2 cores: 64
# to 128 tokens beat 512 by a tenth.
CHUNK_TOKENS = 128


def chunk_plan(start: int, end: int, *, block: int = BLOCK_TOKENS, chunk: int = CHUNK_TOKENS) -> list[tuple[int, int]]:
    """Return steps `[first, last)` that cover the token positions `[start, end)` in order.

    `block` is the storage block, the unit in which prefixes are restored; `chunk` a multiple of it. Steps end at
    absolute multiples of `chunk`, then at the tail, which has 1 to `block` tokens: it yields the first token's logits,
    is never restored (a restored prompt must still compute its last token), and is identical in a cold and in a warm
    run. Raises ValueError unless 0 <= start <= end and block divides chunk.
    """
    if not 0 <= start <= end:
        raise ValueError(f"tokens [{start}, {end}) are not a range")
    if block < 1 or chunk < block or chunk % block:
        raise ValueError(f"chunk {chunk} must be a multiple of block {block}")
    tail = (end - 1) // block * block if end else 0
    cuts = [start]
    if start % block and start < end:  # not a restored prefix but a continued sequence: first reach a boundary
        cuts.append(min(-(-start // block) * block, end))
    while cuts[-1] < tail:
        cuts.append(min((cuts[-1] // chunk + 1) * chunk, tail))
    if cuts[-1] < end:
        cuts.append(end)
    return list(pairwise(cuts))
