"""Compiles the C++ kernels for this very machine, once, into the user's cache directory.

Owns the compiler call and the cached file's name. It never decides whether to use the result (`selection`
does). The name holds a digest of sources, compiler, flags and CPU features: a cache directory shared by
unlike machines, or kept across an upgrade, can never serve a library with instructions that the CPU
lacks.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = ("paged_attention.cpp", "block_copy.cpp")
_HEADERS = ("layout.h",)
# -ffp-contract=fast lets a*b+c become one fused operation, in every loop alike. -ffast-math would also
# reorder sums, and then a row's result would depend on the tile that it is computed in.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-pthread",
)
_TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message is one line."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/kvstored/kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvstored" / "kernels"


def build_kernels(folder: Path | None = None, cpu: str = "native") -> Path:
    """The shared library's path; compiles it (a few seconds) if the cache has none. Raises BuildError.

    `cpu` is the compiler's -march: another than this machine's own is for tests.
    """
    compiler, flags = _compiler(), (*_FLAGS, f"-march={cpu}")
    target = (folder or cache_folder()) / f"kernels-{_digest(compiler, flags)}.so"
    if not target.exists():
        _compile(compiler, flags, target)
    return target


def _compiler() -> str:
    candidates = [os.environ.get("CXX"), "g++", "c++", "clang++"]
    found = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("no C++ compiler (looked for $CXX, g++, c++, clang++)")
    return found


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=12)
    for name in _SOURCES + _HEADERS:
        digest.update((here / name).read_bytes())
    for text in (compiler, _version(compiler), *flags, _cpu()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} --version failed: {error}") from None
    return done.stdout


def _cpu() -> str:
    """What -march=native will see: the CPU's model and its feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name")
    return platform.machine() + "".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Compile to a temporary name, then rename: of two processes at once, both end with a whole file."""
    here = Path(__file__).parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so.partial")
    except OSError as error:
        raise BuildError(f"cannot write {target.parent}: {error.strerror}") from None
    os.close(handle)
    try:
        command = [compiler, *flags, "-o", temporary, *(str(here / name) for name in _SOURCES)]
        subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        Path(temporary).replace(target)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or "no message").splitlines()[0]
        raise BuildError(f"{compiler} failed: {reason}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} could not be run: {error}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)
