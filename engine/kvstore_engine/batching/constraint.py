"""The contract of a constraint: which tokens a grammar or a schema allows next.

One constraint belongs to one sequence. The engine calls it from one thread, in the order of the tokens.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Constraint(Protocol):
    """A rule, such as a grammar or a JSON schema, that says which tokens one answer may have next. While it is not
    `finished` it MUST allow at least one token. The engine calls `mask` before each choice and `accept` once after it,
    except for a token that ended the answer. An exception fails that answer alone.
    """

    @property
    def finished(self) -> bool:
        """True if no token may follow, so that the answer ends here."""
        ...

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Return the tokens that may come next, as an array of 32-bit words: the token with the id t is allowed if bit
        t % 32 of word t // 32 is 1. None allows all tokens. The array may change at the next call.
        """
        ...

    def accept(self, token: int) -> None:
        """Receive the id `token` of the token that was chosen, so that the next `mask` is about the token after it."""
        ...
