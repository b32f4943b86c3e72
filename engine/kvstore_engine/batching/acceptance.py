"""Whether a request can be answered at all. Pure. `policies.Admission` checks the load."""

from kvstore_engine.batching.request import Request
from kvstore_engine.errors import UsageError


def check_request(request: Request, *, context: int, vocabulary: int) -> None:
    """UsageError if `request` can never be answered by an engine with these limits."""
    count = len(request.tokens)
    if not count:
        raise UsageError("the prompt is empty: there is nothing to continue")
    if count >= context:
        raise UsageError(
            f"the prompt has {count} tokens and the context holds {context}, of which one is needed for the "
            "answer: shorten the prompt or run with a larger context or pool"
        )
    if int(request.tokens.min()) < 0 or int(request.tokens.max()) >= vocabulary:
        raise UsageError(f"token ids must be in 0..{vocabulary - 1}")
