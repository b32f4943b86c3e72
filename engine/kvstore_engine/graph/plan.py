"""The plan cuts prompts into steps so that a prompt with a restored prefix gives exactly the same tokens as without it.

Attention rows and products of our own (kernels.base) do not depend on the other rows of a step. The matrix product of
ggml may treat the last `n % 4` rows of a step with another kernel, which rounds differently. So all steps but the last
have a multiple of `BLOCK_TOKENS` tokens. The last step, the tail, begins at the same place whether a prefix was
restored or not: at the last block boundary before the end. `batching.batch_planner` cuts by this rule.
"""

BLOCK_TOKENS = 64  # the storage block's default
