"""A model's file and what may happen to it while it is served; and what the untouched file computes.

Owns the files in a folder. Each way is something that an operator, a script or a tool does to files.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.generate import Generator
from kvstore_engine.generation import Prompt
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool
from kvstore_engine.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests' writer and session
from tests.reference.make_gguf import CHAT_TEMPLATE, TinyModel, write_model  # needs the line above
from tests.reference.memory_session import MemorySession

CONTEXT_TOKENS = 512
ANSWER_TOKENS = 80
_TINY = TinyModel(layers=2, width=64, heads=2, kv_heads=1, head_dim=32, feed_forward=128, seed=1)
_OTHERS = {
    "same shape": replace(_TINY, seed=2),
    "other shape": replace(_TINY, layers=4, seed=3),
    "other template": replace(_TINY, metadata={"tokenizer.chat_template": CHAT_TEMPLATE.replace("user", "USER")}),
}


class ModelFiles:
    """The served model `path` in `folder`; `original` and `others` stay as they are."""

    def __init__(self, folder: Path) -> None:
        self.path, self._target = folder / "live.gguf", folder / "target.gguf"
        self.original = write_model(folder / "original.gguf", _TINY)
        self.others = {
            name: write_model(folder / f"{name.replace(' ', '-')}.gguf", model) for name, model in _OTHERS.items()
        }
        self._new, self._link, self._kept = (folder / f"{name}.gguf" for name in ("new", "link", "kept"))

    def place(self, *, is_new: bool, behind_a_link: bool) -> None:
        """The original at `path`, as a file of its own or behind a symbolic link: a new copy of it, or the one of
        before, which a server has open."""
        for path in (self.path, self._target, self._link):
            path.unlink(missing_ok=True)
        if is_new:
            self._kept.unlink(missing_ok=True)
            shutil.copy(self.original, self._kept)
        (self._target if behind_a_link else self.path).hardlink_to(self._kept)
        if behind_a_link:
            self.path.symlink_to(self._target)

    def another_name(self) -> Path:
        """A second name of the served file."""
        self._link.hardlink_to(self.served)
        return self._link

    def prepared(self, other: str) -> Path:
        """A fresh copy of another model, to be moved or copied over the served one."""
        return Path(shutil.copy(self.others[other], self._new))

    def has_weights_of_original(self) -> bool:
        """Return whether what `path` leads to now has the original's digest, and so its blocks."""
        with GGUFFile.open(self.path) as one, GGUFFile.open(self.original) as two:
            return one.weights_digest() == two.weights_digest()

    @property
    def served(self) -> Path:
        """The file itself, whatever leads to it."""
        return self.path.resolve()


def _link_turned(files: ModelFiles, other: str) -> None:
    files.path.unlink()
    files.path.symlink_to(files.others[other])


def _overwritten(files: ModelFiles, other: str) -> None:
    files.served.write_bytes(files.others[other].read_bytes())


def _overwritten_with_its_time(files: ModelFiles, other: str) -> None:
    path, before = files.served, files.served.stat()
    _overwritten(files, other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _overwritten_by_a_map(files: ModelFiles, other: str) -> None:
    data = files.others[other].read_bytes()
    with files.served.open("r+b") as file:
        file.truncate(len(data))
        with mmap.mmap(file.fileno(), len(data)) as mapped:
            mapped[:] = data


def _appended(files: ModelFiles, other: str) -> None:
    with files.served.open("ab") as file:
        file.write(bytes(4096))


WAYS: dict[str, Callable[[ModelFiles, str], object]] = {
    "renamed over": lambda files, other: files.prepared(other).rename(files.served),
    "link turned": _link_turned,
    "deleted": lambda files, other: files.served.unlink(),
    "touched": lambda files, other: os.utime(files.served),
    "overwritten": _overwritten,
    "overwritten with its time": _overwritten_with_its_time,
    "overwritten by another name": lambda files, other: shutil.copyfile(files.others[other], files.another_name()),
    "overwritten by a map": _overwritten_by_a_map,
    "cut": lambda files, other: os.truncate(files.served, files.served.stat().st_size // 2),
    "appended": _appended,
}


@dataclass(frozen=True, slots=True)
class TrueAnswer:
    """The text, and all tokens of prompt and answer."""

    text: str
    tokens: npt.NDArray[np.int32]


class Truth:
    """The answers of the untouched file `path`: an engine of its own in this process, with a store in memory."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        file = GGUFFile.open(path)
        model = stack.enter_context(load_model(file, context=CONTEXT_TOKENS))
        tokenizer = Tokenizer.from_metadata(file.metadata)
        pool = BlockPool(model.config, CONTEXT_TOKENS // 16)
        executor = stack.enter_context(
            Executor(model, pool, StepSizes(threads=1, max_sequences=1, max_context=CONTEXT_TOKENS))
        )
        self.fingerprint = fingerprint_of(file, model.config, tokenizer, pool, file.weights_digest())
        self._store = MemorySession(self.fingerprint.payload_bytes(), block_tokens=self.fingerprint.block_tokens)
        self._generator = Generator(tokenizer=tokenizer, executor=executor, context=CONTEXT_TOKENS, session=self._store)
        stack.callback(self._generator.close)
        self._tokenizer = tokenizer

    def answer(self, prompt: str) -> TrueAnswer:
        """Greedy, of `ANSWER_TOKENS` tokens; its blocks are kept."""
        settings = RequestSettings(max_tokens=ANSWER_TOKENS, ignore_end=True)
        made = self._generator.generate(Prompt(prompt), settings)
        ids = self._tokenizer.encode(prompt, add_special=True, parse_special=False)
        return TrueAnswer(made.text, np.concatenate([ids, np.array(made.tokens, np.int32)]))

    def payload(self, tokens: npt.NDArray[np.int32], block: int) -> npt.NDArray[np.uint8]:
        """The bytes of one of the blocks of an answer."""
        end = (block + 1) * self.fingerprint.block_tokens
        return self._store.blocks[tokens[:end].astype(np.int32).tobytes()]
