#!/usr/bin/env bash
# NumPy 2.2.6: a conversion to int32 checks the numbers of a list, and of nothing else.
#
#   numpy.asarray([2**32 + 5], "i4")                          OverflowError
#   numpy.asarray(array.array("q", [2**32 + 5]), "i4")        [5]: a buffer's numbers are cut
#   numpy.asarray([numpy.array(2**32 + 5)], "i4")             [5]: so are those of arrays in a list
#   numpy.asarray([5.9], "i4"), numpy.asarray(["5"], "i4")    [5]: floats are cut, text is parsed, also in a list
#
# So a check of types and range that relies on the conversion holds for lists of Python's ints alone. Seen: the five lines
# below, in this order. Fails if that changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'numpy==2.2.6'
"$work/venv/bin/python" - <<'PYTHON' | tee "$work/seen"
import array

import numpy as np

wide = 2**32 + 5
for name, given in (
    ("list", [wide]),
    ("buffer", array.array("q", [wide])),
    ("array in a list", [np.array(wide)]),
    ("float", [5.9]),
    ("text", ["5"]),
):
    try:
        print(name, np.asarray(given, dtype="<i4").tolist())
    except OverflowError:
        print(name, "OverflowError")
PYTHON
diff "$work/seen" - <<'SEEN'
list OverflowError
buffer [5]
array in a list [5]
float [5]
text [5]
SEEN
