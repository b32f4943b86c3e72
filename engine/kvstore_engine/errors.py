"""The errors that the command line turns into exit codes. A broken invariant is an AssertionError or a RuntimeError."""


class UsageError(ValueError):
    """An error: the caller asked for something impossible. The message says what is wrong and what to do. A command
    that ends with it has the exit code 2.
    """


class OperationError(RuntimeError):
    """An error: the environment failed, for example a network, a download or a full disk. A command that ends with it
    has the exit code 1.
    """
