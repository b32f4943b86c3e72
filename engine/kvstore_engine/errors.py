"""The two ways in which a request can be refused, for the command line to turn into exit codes.

Owns nothing else. A broken invariant of ours is neither of these: it is an AssertionError or a RuntimeError
and keeps its traceback.
"""


class UsageError(ValueError):
    """The caller asked for something that cannot be: the message says what was wrong and what to do (exit
    2).
    """


class OperationError(RuntimeError):
    """The request was fine but the world was not: no network, a bad download, a full disk (exit 1)."""
