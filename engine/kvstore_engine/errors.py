"""The errors that the command line turns into exit codes. A broken invariant is an AssertionError or a RuntimeError."""


class UsageError(ValueError):
    """The caller asked for something impossible; the message says what is wrong and what to do (exit code 2)."""


class OperationError(RuntimeError):
    """The environment failed: no network, a bad download, a full disk (exit code 1)."""
