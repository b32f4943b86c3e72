"""The ggml that a side runs, and the CPU it was built for: a comparison of two builds compares compilers, not engines.

    python -m kvstore_engine.bench.ggml_build PATH      # prints the CPU features of the ggml there

The module owns the identity of a build, the digests of the library files that a process has really mapped, and the
rule that makes sides comparable: this engine's kernels may only use instructions that the common ggml uses.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from kvstore_engine.errors import OperationError

_GGML = re.compile(r"(libggml|libllama|xllamacpp)[^/]*\.(so|dylib)")
_ISA_VARIABLE = "KVENGINE_KERNEL_ISA"
_TIMEOUT_S = 60.0


def mapped_libraries(pids: Iterable[int]) -> frozenset[Path]:
    """Return the paths of the ggml libraries that the processes `pids` have loaded."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
        found |= {Path(path) for path in paths if _GGML.fullmatch(path.rpartition("/")[2].split(".so.")[0] + ".so")}
    return frozenset(found)


def family(pid: int) -> list[int]:
    """Return the process number `pid` and the numbers of all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


@cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same_build(ours: Iterable[Path], theirs: Iterable[Path]) -> bool:
    """Return True if every ggml library file in `ours` has the same bytes as one in `theirs`. Return False if either
    list is empty.
    """
    our_digests = {digest(path) for path in ours if "llama" not in path.name or "xllamacpp" in path.name}
    return bool(our_digests) and our_digests <= {digest(path) for path in theirs}


def cpu_features(library: Path) -> list[str]:
    """Return the names of the CPU features for which the ggml library in the file or folder `library` was built. Raises
    OperationError if the library does not report them.
    """
    command = [sys.executable, "-m", __name__, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise OperationError(f"{library} does not say what it was built for: {last}")
    features: list[str] = json.loads(done.stdout.splitlines()[-1])
    return features


def kernel_environment(features: Iterable[str]) -> dict[str, str]:
    """Return the environment variables that limit this engine's kernels to the CPU `features` that ggml uses."""
    features = set(features)
    if "avx512" in features or "avx2" not in features:
        return {}
    return {_ISA_VARIABLE: "avx2"}


def main(arguments: list[str]) -> None:
    from kvstore_engine.ggml import load_library

    print(json.dumps(load_library(Path(arguments[0])).describe()["cpu_features"].split()))


if __name__ == "__main__":
    main(sys.argv[1:])
