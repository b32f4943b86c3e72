#!/bin/sh
# JAX 0.10.2 (CPU): jax.dlpack.from_dlpack takes an array whose axes are permuted, without a copy of ours, but refuses one
# that has gaps between its rows, such as the K half of a buffer in which K and V of each token lie side by side: only
# "trivial (compact) striding" is implemented. NumPy takes both views. So it is not strides as such that JAX
# cannot take, and a test with a transposed array says nothing about a sliced one.
#
# Output seen:
#     permuted: numpy taken, jax taken
#     gaps: numpy taken, jax refused
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON' | tee "$place/output"
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

values = np.arange(2 * 3 * 64, dtype=np.float32).reshape(3, 2, 64)
views = {"permuted": values.transpose(1, 0, 2), "gaps": values[:, 0]}
readers: dict[str, Callable[[Any], Any]] = {
    "numpy": np.from_dlpack, "jax": jax.dlpack.from_dlpack,
}  # fmt: skip
for what, view in views.items():
    said = []
    for name, reader in readers.items():
        try:
            same = np.array_equal(np.asarray(reader(view)), view)
            said.append(f"{name} {'taken' if same else 'differs'}")
        except Exception as error:
            assert "striding" in str(error), error
            said.append(f"{name} refused")
    print(f"{what}: {', '.join(said)}")
PYTHON
printf 'permuted: numpy taken, jax taken\ngaps: numpy taken, jax refused\n' | diff - "$place/output"
