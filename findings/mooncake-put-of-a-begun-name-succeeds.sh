#!/bin/sh
# Mooncake Store 0.3.13.post1 (mooncake-transfer-engine-non-cuda): `put` answers 0, success, for a name that another
# client has only begun, and stores nothing. `batch_put_session_start` by a second client answers -705 (the object
# exists) for the same name, while `batch_is_exist` says 0 and `get` returns no byte. So for a writer "exists" is no
# sign that anyone can read the value; the master keeps such a name for some 30 s after the first writer died.
# Expected: an error from `put`, or the value stored.
# Seen: put 0, start [-705], exist [0], get 0 bytes; after the writer was killed the same.
# Needs: python3 with venv and pip, apt-get and dpkg (libibverbs1, unpacked, not installed). Fails if that changes.
set -eu
work=$(mktemp -d)
trap 'kill $(cat "$work/pids" 2>/dev/null) 2>/dev/null; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy
(cd "$work" && apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 >/dev/null 2>&1 && for deb in *.deb; do dpkg -x "$deb" sys; done)
LD_LIBRARY_PATH=$(find "$work/sys" -name '*.so.*' -printf '%h\n' | sort -u | paste -sd:)
export LD_LIBRARY_PATH MC_LOG_LEVEL=ERROR
port=$("$work/venv/bin/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
master=$(find "$work/venv" -name mooncake_master -path '*mooncake/*' | head -n 1)
chmod +x "$master"
"$master" --rpc_address=127.0.0.1 --rpc_port="$port" --metrics_port=0 --enable_metric_reporting=false >"$work/log" 2>&1 &
echo $! >"$work/pids"
cat >"$work/try.py" <<'PYTHON'
import subprocess
import sys
import time

from mooncake.store import MooncakeDistributedStore


def client(segment_bytes: int) -> MooncakeDistributedStore:
    for _ in range(60):
        store = MooncakeDistributedStore()
        if store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", sys.argv[1]) == 0:
            return store
        time.sleep(0.5)
    raise SystemExit("the master was not reached")


if len(sys.argv) > 2:
    store = client(0)
    print("begun" if store.batch_put_session_start(["name"], [1000]) == [0] else "refused", flush=True)
    sys.stdin.read()
    raise SystemExit

store = client(64 << 20)
writer = subprocess.Popen(
    [sys.executable, __file__, sys.argv[1], "writer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
while (line := writer.stdout.readline()) not in ("begun\n", ""):
    pass
assert line, "the first writer did not begin"


def seen() -> tuple[object, ...]:
    return (
        store.put("name", b"x" * 1000),
        store.batch_put_session_start(["name"], [1000]),
        store.batch_is_exist(["name"]),
        len(store.get("name")),
    )


before = seen()
writer.kill()
writer.wait()
after = seen()
print("put, start, exist, bytes:", before, "; writer killed:", after)
sys.exit(before != (0, [-705], [0], 0) or after != before)
PYTHON
"$work/venv/bin/python" "$work/try.py" "127.0.0.1:$port" >"$work/seen" 2>/dev/null || failed=1
grep '^put' "$work/seen"
exit "${failed:-0}"
