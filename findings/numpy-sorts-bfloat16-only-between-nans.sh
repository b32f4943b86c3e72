#!/bin/sh
# ml_dtypes 0.6.0, numpy 2.4.6: numpy.sort puts the NaN of a float16 or float32 array last. In an array of bfloat16 or
# of an 8-bit float a NaN counts as equal to every number, so one NaN among many may keep the numbers before it apart
# from those behind it, each part sorted by itself, `kind="stable"` or not. There is no warning, and what numpy builds
# on sorting goes wrong with it: `unique` gives values twice, and `percentile`, which is NaN for the others, gives a
# plausible number. A cast of 500 to float8_e4m3fn leaves such a NaN. So convert to float32 before sorting.
#
# Output seen (16 numbers repeated in mixed order, one NaN in the middle):
#     float32: in order, 17 unique, percentile 75 nan
#     float16: in order, 17 unique, percentile 75 nan
#     bfloat16: not in order, 33 unique, percentile 75 a number
#     float8_e4m3fn: not in order, 33 unique, percentile 75 a number
#     float8_e5m2: not in order, 33 unique, percentile 75 a number
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON' 2>"$place/errors" | tee "$place/output"
import ml_dtypes
import numpy as np

NUMBERS, COUNT = 16, 1001
values = 2.0 ** (np.arange(COUNT) * 7 % NUMBERS - 8)
values[COUNT // 2] = np.nan
for kind in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    array = values.astype(kind)
    assert np.isnan(array).sum() == 1
    ordered = np.sort(array).astype(np.float32)
    descents = np.diff(ordered[~np.isnan(ordered)]) < 0
    share = np.percentile(array, 75)
    print(
        f"{kind.__name__}: {'not in' if descents.any() else 'in'} order, {len(np.unique(array))} unique, "
        f"percentile 75 {'nan' if np.isnan(share) else 'a number'}"
    )
PYTHON
diff - "$place/output" <<'SEEN'
float32: in order, 17 unique, percentile 75 nan
float16: in order, 17 unique, percentile 75 nan
bfloat16: not in order, 33 unique, percentile 75 a number
float8_e4m3fn: not in order, 33 unique, percentile 75 a number
float8_e5m2: not in order, 33 unique, percentile 75 a number
SEEN
