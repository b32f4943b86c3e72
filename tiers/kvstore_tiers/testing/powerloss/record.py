"""Recording: compile the shim, start a log, run processes whose file operations go into it, leave marks in it.

Owns the shim's shared object (compiled once into a cache directory) and a log's beginning. Never replays. Invariants:
the recorded directory is empty when recording begins, so that the log is the whole truth about it; the log is outside
of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kvstore_tiers.testing.powerloss.log import Kind, Operation, pack_mark, write_log
from kvstore_tiers.testing.powerloss.medium import Tree

SOURCE = Path(__file__).with_name("shim.c")
CACHE_ENVIRONMENT = "KVSTORED_SHIM_CACHE"


class CompilerMissing(Exception):
    """An error: no C compiler was found that can compile the recorder of file operations. The message says what to
    install.
    """


def shim_path() -> Path:
    """Return the path of the shared library that records file operations. It is compiled on first use. Raises
    CompilerMissing.
    """
    cache = Path(os.environ.get(CACHE_ENVIRONMENT) or Path.home() / ".cache" / "kvstored")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = cache / f"powerloss-{digest}.so"
    if path.exists():
        return path
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise CompilerMissing("recording file operations needs a C compiler (cc, gcc or clang): install gcc")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        built = Path(scratch) / path.name
        done = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", str(built), str(SOURCE), "-ldl", "-lpthread"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CompilerMissing(
                f"{compiler} cannot compile {SOURCE.name}: {done.stderr.strip()[-500:]}; install gcc and libc's headers"
            )
        built.replace(path)
    return path


class Recording:
    """A recording of all file operations that processes do below the empty directory `root`, written to the file `log`.
    The files `tree` are put into `root` first, and the notes `marks` begin the log. Raises CompilerMissing if the
    recorder cannot be compiled, ValueError if `root` is not empty or contains the log.
    """

    def __init__(
        self, root: Path, log: Path, *, tree: Tree | None = None, marks: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.root = Path(os.path.realpath(root))
        self.log = Path(os.path.realpath(log))
        if any(self.root.iterdir()):
            raise ValueError(f"{self.root} is not empty: a recording must begin with nothing")
        if self.log.is_relative_to(self.root):
            raise ValueError(f"the log {self.log} lies in the directory that is recorded")
        self.shim = shim_path()
        put_tree(tree or {}, self.root)
        beginning = list(_beginning(self.root, tree or {}, marks))
        write_log(self.log, beginning)
        Path(f"{self.log}.clock").write_bytes((beginning[-1].end + 1).to_bytes(8, "little"))

    def environment(self) -> dict[str, str]:
        """Return the environment variables to start a process with, so that its file operations are recorded."""
        return {
            **os.environ,
            "LD_PRELOAD": str(self.shim),
            "POWERLOSS_ROOT": str(self.root),
            "POWERLOSS_LOG": str(self.log),
        }

    def marker(self) -> Marker:
        """Return a writer of marks (notes in the log) for a process whose own file operations are not recorded, such as
        a client.
        """
        return Marker(self.shim, self.log)


def put_tree(tree: Tree, directory: Path) -> None:
    """Write the files of `tree`, contents by path, into the empty `directory`. A content of None means a directory."""
    for path, content in tree.items():
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)


def _beginning(root: Path, tree: Tree, marks: Sequence[dict[str, Any]]) -> Iterator[Operation]:
    """Yield the operations that make an empty medium hold `tree`, synced."""
    ticks = count()
    yield Operation(Kind.MKDIR, next(ticks), next(ticks), root.stat().st_ino, path=str(root))
    for path, content in tree.items():
        inode, kind = (root / path).stat().st_ino, Kind.MKDIR if content is None else Kind.CREATE
        yield Operation(kind, next(ticks), next(ticks), inode, path=str(root / path))
        if content is not None:
            yield Operation(Kind.WRITE, next(ticks), next(ticks), inode, data=content)
    yield Operation(Kind.SYNC_ALL, next(ticks), next(ticks), through=True)
    for said in marks:
        yield Operation(Kind.MARK, next(ticks), next(ticks), data=pack_mark(said))


class Marker:
    """A writer of marks into the log of a recording. A mark is a note by which the recorded process says, for example,
    which blocks it has promised to keep.
    """

    def __init__(self, shim: Path, log: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(shim))
        if log is not None and (error := self._library.powerloss_attach(os.fsencode(log))):
            raise OSError(error, os.strerror(error), str(log))

    @classmethod
    def of_this_process(cls) -> Marker:
        """Return a writer of marks for the recording that the calling process is a part of."""
        return cls(Path(os.environ["LD_PRELOAD"]))

    def mark(self, **said: Any) -> None:
        """Write the named values `said` as a mark into the log, and return once it is there. Raises OSError."""
        raw = pack_mark(said)
        if error := self._library.powerloss_mark(raw, ctypes.c_size_t(len(raw))):
            raise OSError(error, os.strerror(error))
