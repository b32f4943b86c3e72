"""The model's open file on its way from the HTTP process to the scheduler's, the first one and later ones.

Owns the JSON form of what goes with the descriptor. Without a digest the file must be as it was when the HTTP process
read its tokenizer and chat template; with the digest of the first scheduler it must hold what it held then.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvstore_engine.gguf import FileDigest, FileIdentity, FileWatch, GGUFError, GGUFFile, OpenFile, changed


@dataclass(frozen=True, slots=True)
class HandedFile:
    """`path` is what messages call the file behind `descriptor`."""

    path: str
    descriptor: int
    identity: FileIdentity
    digest: FileDigest | None = None

    @classmethod
    def of(cls, file: OpenFile, digest: FileDigest | None) -> Self:
        return cls(str(file.path), file.descriptor, file.identity, digest)

    def encode(self) -> str:
        return json.dumps([self.path, self.descriptor, self.identity, self.digest])

    @classmethod
    def decode(cls, text: str) -> Self:
        path, descriptor, identity, digest = json.loads(text)
        return cls(path, descriptor, FileIdentity(*identity), FileDigest(*digest) if digest else None)

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[FileWatch]:
        """The file, parsed and watched, until the block ends. FileChanged if it does not hold what it held."""
        with OpenFile(Path(self.path), self.descriptor, self.identity) as source:
            try:
                file = GGUFFile.open(source)
            except GGUFError:  # the HTTP process could parse it
                raise changed(source.path) from None
            with file:
                watch = FileWatch(file, self.digest)
                watch.check()
                yield watch
