#!/bin/sh
# numpy 2.4.6: the first call of `numpy.unique`, on plain integers, imports all of `numpy.ma`, because it asks whether
# the array is masked. So a program that has imported numpy long ago still reads files and compiles classes in the
# middle of its first `unique`: an eighth of the time of `import numpy`, once, in the thread that calls. Where
# that thread serves requests, call it once at the start, or sort and compare neighbours.
#
# Output seen:
#     after import numpy: False
#     after numpy.sort: False
#     after numpy.unique: True
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON' | tee "$place/output"
import sys

import numpy

print("after import numpy:", "numpy.ma" in sys.modules)
numpy.sort([2, 1])
print("after numpy.sort:", "numpy.ma" in sys.modules)
numpy.unique([2, 1])
print("after numpy.unique:", "numpy.ma" in sys.modules)
PYTHON
printf 'after import numpy: False\nafter numpy.sort: False\nafter numpy.unique: True\n' | diff - "$place/output"
