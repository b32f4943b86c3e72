"""Compiles the C++ kernels, once, into the user's cache directory.

The module owns the compiler calls and the cached file's name. It does not decide whether to use the result (`selection`
does). The library holds the attention kernel once for each instruction set of the architecture and picks at run time
(dispatch.cpp): a cache directory shared by unlike machines can never serve instructions that a CPU lacks. The name
holds a digest of sources, compiler and flags.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvstore_cuda.kernel_cache import cache_folder, sweep
from kvstore_proto.replaced_file import BESIDE
from kvstore_proto.version import pip_install

_PRODUCTS = ("q4_product.cpp", "q8_product.cpp")
_SOURCES = ("paged_attention.cpp", *_PRODUCTS, "dispatch.cpp", "block_copy.cpp")
_HEADERS = ("layout.h", "simd.h", "elements.h", "pass.h", "tile.h", "tile_sums.h", "product.h")
# -ffp-contract=off and no -ffast-math: the sources say where operations fuse and in which order sums are formed, so
# that a row's result does not depend on the loop that computes it.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fPIC", "-pthread", "-g0")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_TIMEOUT_S = 600.0  # it takes ten seconds of one core, which may be shared


class _Compiler(NamedTuple):
    """Commands that compile C++, link it, and print their version."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    version: tuple[str, ...]


class _Unit(NamedTuple):
    """One compiler call: `source` with `flags`."""

    source: str
    flags: tuple[str, ...]


class BuildError(RuntimeError):
    """An error: the native kernels could not be compiled. The message is one line."""


def build_kernels() -> Path:
    """Return the path of the shared library of the native kernels in the user's cache folder. If it is not there, it is
    compiled first, which takes a few seconds. Raises BuildError.
    """
    compiler, units = _compiler(), _units(platform.machine())
    target = cache_folder() / f"kernels-{_digest(compiler, units)}.so"
    if not target.exists():
        _build(compiler, units, target)
    return target


def _units(machine: str) -> list[_Unit]:
    """Return the compiler calls for the architecture `machine`."""
    builds: dict[str, tuple[str, ...]] = {"baseline": ()}
    if x86 := machine in ("x86_64", "AMD64"):
        builds |= {"avx2": _AVX2, "avx512": _AVX512}
    attention = [
        _Unit("paged_attention.cpp", (f"-DKV_ATTENTION=kv_paged_attention_{name}", *flags))
        for name, flags in builds.items()
    ]
    product_builds = {"avx2": _AVX2, "vnni": (*_AVX512, "-mavx512vnni")} if x86 else {}
    products = [
        _Unit(source, (f"-DKV_PRODUCT=kv_{Path(source).stem}_{name}", *flags))
        for source in _PRODUCTS
        for name, flags in product_builds.items()
    ]
    dispatch = _Unit("dispatch.cpp", ("-DKV_HAS_X86",) if x86 else ())
    return [*attention, *products, dispatch, _Unit("block_copy.cpp", ())]


def _compiler() -> _Compiler:
    """Return the system's compiler, or Zig's of the wheel `ziglang`. Raises BuildError."""
    candidates = [os.environ.get("CXX"), "g++", "c++", "clang++"]
    found = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if found is not None:
        return _Compiler((found,), (found, "-shared", "-pthread", "-s"), (found, "--version"))
    wheel = find_spec("ziglang")
    if wheel is None or wheel.origin is None:
        raise BuildError(
            f"no C++ compiler (looked for $CXX, g++, c++, clang++): install one, or {pip_install('compiler')}"
        )
    zig = str(Path(wheel.origin).with_name("zig"))
    # Without a target it compiles for this very processor. Its linker alone, as its driver first compiles the libraries
    # to link with, for up to a minute: the C library is the one that Python has loaded.
    target = f"{platform.machine()}-linux-gnu.2.17"
    return _Compiler((zig, "c++", "-target", target), (zig, "ld.lld", "-shared", "-z", "now", "-s"), (zig, "version"))


def _digest(compiler: _Compiler, units: list[_Unit]) -> str:
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=12)
    for name in _SOURCES + _HEADERS:
        digest.update((here / name).read_bytes())
    texts = (*compiler.compile, _version(compiler.version), platform.machine(), *_FLAGS, *(str(unit) for unit in units))
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{' '.join(command)} failed: {error}") from None
    return done.stdout


def _build(compiler: _Compiler, units: list[_Unit], target: Path) -> None:
    """Compile next to the target, then rename: two processes at once both end with a whole file."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(target.parent)
        folder = tempfile.mkdtemp(dir=target.parent, suffix=BESIDE)
    except OSError as error:
        raise BuildError(f"cannot write {target.parent}: {error.strerror}") from None
    try:
        objects = [str(Path(folder) / f"{index}.o") for index in range(len(units))]
        here = Path(__file__).parent
        compiling = [
            [*compiler.compile, *_FLAGS, *unit.flags, "-c", str(here / unit.source), "-o", made]
            for unit, made in zip(units, objects, strict=True)
        ]
        _run_all(compiling, folder)
        linked = Path(folder) / "kernels.so"
        _run_all([[*compiler.link, "-o", str(linked), *objects]], folder)
        linked.replace(target)
    except OSError as error:
        raise BuildError(f"{compiler.compile[0]} could not be run: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_all(commands: list[list[str]], folder: str) -> None:
    """Run `commands` side by side, Zig's caches in `folder`. Raises BuildError with the first line of the first
    failure's output.
    """
    compiler = commands[0][0]
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
    start = partial(subprocess.Popen, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(start(command)) for command in commands]
        for process in running:
            try:
                output, _ = process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                for late in running:
                    late.kill()
                raise BuildError(f"{compiler} took more than {_TIMEOUT_S:g} s") from None
            if process.returncode:
                reason = (output.strip() or "no message").splitlines()[0]
                raise BuildError(f"{compiler} failed: {reason}")
