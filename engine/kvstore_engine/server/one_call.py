"""Ends an answer with its first tool call, for requests with `parallel_tool_calls` false.

Owns no grammar: until then every token is allowed, or what another constraint allows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.constraint import Constraint
from kvstore_engine.server.tools import ToolCallReader, Turn
from kvstore_engine.tokenizer import Tokenizer


class OneCall:
    """One answer's state. Implements `batching.Constraint`."""

    def __init__(self, tokenizer: Tokenizer, turn: Turn, make_other: Callable[[], Constraint] | None) -> None:
        """`turn` says where the answer begins; `make_other` makes a constraint that holds as well."""
        self._reader = ToolCallReader(in_thought=turn == "tool_after_thought")
        self._stream = tokenizer.stream(special=True, continues=True)
        self._other = make_other() if make_other is not None else None

    @property
    def finished(self) -> bool:
        return self._reader.calls > 0 or (self._other is not None and self._other.finished)

    def mask(self) -> npt.NDArray[np.uint32] | None:
        return self._other.mask() if self._other is not None else None

    def accept(self, token: int) -> None:
        self._reader.push(self._stream.push(token))
        if self._other is not None:
            self._other.accept(token)
