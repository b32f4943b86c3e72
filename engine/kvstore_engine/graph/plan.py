"""How prompts are cut into steps: a prompt with a restored prefix gives exactly the same tokens as without.

Attention rows and products of our own (kernels.base) do not depend on what else is in a step, but ggml's matrix product
may treat the last `n % 4` rows of it with another kernel, which rounds differently. So all steps but the last have a
multiple of `BLOCK_TOKENS` tokens, and the last one, the tail, begins at the same place whether or not a prefix was
restored: at the last block boundary before the end. `batching.batch_planner` cuts by this rule.
"""

BLOCK_TOKENS = 64  # the storage block's default
