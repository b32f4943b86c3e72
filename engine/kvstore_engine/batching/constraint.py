"""The contract of a constraint: which tokens a grammar or a schema allows next.

One constraint belongs to one sequence. The engine calls it from one thread, in the order of the tokens.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Constraint(Protocol):
    """The implementation MUST allow at least one token while it is not `finished`. An exception fails its answer alone.

    The engine calls `mask` before it chooses a token, and `accept` exactly once for each token that it chose; never
    `accept` for a token that ended the answer.
    """

    @property
    def finished(self) -> bool:
        """True if no token may follow: the answer ends here."""
        ...

    def mask(self) -> npt.NDArray[np.uint32] | None:
        """Return the allowed tokens as bits, token t in bit t % 32 of word t

        32; None if all are allowed. The caller reads the result at once.
        """
        ...

    def accept(self, token: int) -> None:
        """Note that `token` was chosen."""
        ...
