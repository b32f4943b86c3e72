#!/bin/sh
# Transformers 5.24.0 replaces itself in `sys.modules` when the first module that needs a processor is loaded, which any
# model does: `transformers.processing_utils` executes the package's __init__ a second time. A module that imported
# `transformers` before, and one that does so after, hold different objects of one name and path: an attribute that is
# set or patched on one (a version in a test, a class replaced by another) is not seen by the other, and which of them a
# test patches depends on the order of imports. Nothing is reloaded by the caller, and no message is printed.
#
# Output seen:
#     the module in sys.modules is the imported one: True before, False after
#     same file: True
#     an attribute set on the first is seen on the second: False
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0
"$place/venv/bin/python" - <<'PYTHON' 2>"$place/errors" | tee "$place/output"
import sys

import transformers as first

before = sys.modules["transformers"] is first
import transformers.processing_utils  # noqa: E402, F401

second = sys.modules["transformers"]
first.__version__ = "patched"
print(f"the module in sys.modules is the imported one: {before} before, {second is first} after")
print(f"same file: {second.__file__ == first.__file__}")
print(f"an attribute set on the first is seen on the second: {second.__version__ == 'patched'}")
PYTHON
cat >"$place/seen" <<'SEEN'
the module in sys.modules is the imported one: True before, False after
same file: True
an attribute set on the first is seen on the second: False
SEEN
cmp -s "$place/output" "$place/seen" || {
    cat "$place/errors" >&2
    echo "changed: expected" >&2
    cat "$place/seen" >&2
    exit 1
}
