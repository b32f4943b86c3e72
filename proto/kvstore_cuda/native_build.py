"""Compiles C++ sources into a shared library, once, in the user's cache directory; or ships it beside its sources.

The module owns the compiler calls and the file's name, which holds a digest of sources and flags, and in the cache of
the compiler too. A package for machines without a compiler ships libraries that its build has made (`ship_library`).
The caller chooses the sources, and the flags of each. A cache directory that unlike machines share serves each of them:
the flags say for which instructions a unit is compiled.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvstore_cuda.kernel_cache import cache_folder, sweep
from kvstore_proto.replaced_file import BESIDE
from kvstore_proto.version import pip_install

# -ffp-contract=off and no -ffast-math: the sources say where operations fuse and in which order sums are formed, so
# that a result does not depend on the loop that computes it.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fPIC", "-pthread", "-g0")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_TIMEOUT_S = 600.0  # it takes ten seconds of one core, which may be shared


class _Compiler(NamedTuple):
    """Commands that compile C++, link it, and print their version."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    version: tuple[str, ...]


class Unit(NamedTuple):
    """One compiler call: `source` with `flags`."""

    source: str
    flags: tuple[str, ...]


class BuildError(RuntimeError):
    """The library could not be compiled; the message is one line."""


def build_library(
    name: str, folder: Path, units: Sequence[Unit], headers: Sequence[str] = (), *, may_compile: bool = True
) -> Path:
    """Return the path of the shared library `name` of `units`; compile it (some seconds) if it was not shipped and the
    cache has none. Sources and the `headers` that they include are in `folder`. Raises BuildError, also where it is
    neither there nor `may_compile`."""
    shipped = _shipped(name, folder, units, headers)
    if shipped.exists():
        return shipped
    compiler = _compiler()
    name_of_compiler, *arguments = compiler.compile
    texts = (Path(name_of_compiler).name, *arguments, _version(compiler.version))  # wherever it is installed
    target = cache_folder() / f"{name}-{_digest(folder, units, headers, texts)}.so"
    if not target.exists():
        if not may_compile:
            raise BuildError(f"{target} is not compiled yet")
        _build(compiler, folder, units, target)
    return target


def ship_library(name: str, folder: Path, units: Sequence[Unit], headers: Sequence[str] = ()) -> None:
    """Compile the shared library `name` into `folder`, beside its sources, for `build_library` of machines that have no
    compiler. Raises BuildError."""
    _build(_compiler(), folder, units, _shipped(name, folder, units, headers))


def _shipped(name: str, folder: Path, units: Sequence[Unit], headers: Sequence[str]) -> Path:
    return folder / f"{name}-{_digest(folder, units, headers)}.so"


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


def _digest(folder: Path, units: Sequence[Unit], headers: Sequence[str], compiler: Sequence[str] = ()) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for name in (*dict.fromkeys(unit.source for unit in units), *headers):
        digest.update((folder / name).read_bytes())
    for text in (*compiler, platform.machine(), *FLAGS, *(str(unit) for unit in units)):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{' '.join(command)} failed: {error}") from None
    return done.stdout


def _build(compiler: _Compiler, sources: Path, units: Sequence[Unit], target: Path) -> None:
    """Compile next to the target, then rename: two processes at once both end with a whole file."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(target.parent)
        folder = tempfile.mkdtemp(dir=target.parent, suffix=BESIDE)
    except OSError as error:
        raise BuildError(f"cannot write {target.parent}: {error.strerror}") from None
    try:
        objects = [str(Path(folder) / f"{index}.o") for index in range(len(units))]
        compiling = [
            [*compiler.compile, *FLAGS, *unit.flags, "-c", str(sources / unit.source), "-o", made]
            for unit, made in zip(units, objects, strict=True)
        ]
        _run_all(compiling, folder)
        linked = Path(folder) / "linked.so"
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
