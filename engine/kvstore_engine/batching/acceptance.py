"""Whether a request can be answered at all. Pure. `policies.Admission` checks the load."""

from kvstore_engine.batching.request import Request
from kvstore_engine.blocks import BlockSpace
from kvstore_engine.errors import UsageError


def check_request(request: Request, *, context: int, vocabulary: int, places: int, space: BlockSpace) -> None:
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
    if request.settings.beams is not None:
        _check_beams(request, request.settings.beams.width, context=context, places=places, space=space)


def _check_beams(request: Request, width: int, *, context: int, places: int, space: BlockSpace) -> None:
    if width > places:
        raise UsageError(f"a beam search of {width} beams does not fit the {places} sequences that run at a time")
    if not space.is_sharing:
        raise UsageError("a beam search needs prefix sharing, by which preempted beams share blocks again")
    # At worst all answers differ from their first token on; the last token of each is never computed.
    count = len(request.tokens)
    prompt = count // space.block_tokens
    longest = space.blocks_for(min(count + request.settings.max_tokens, context) - 1)
    wanted = prompt + width * (longest - prompt)
    if wanted > space.pool.blocks:
        raise UsageError(
            f"a beam search of {width} beams and {request.settings.max_tokens} tokens after this prompt may need "
            f"{wanted} blocks and the pool has {space.pool.blocks}: ask for fewer beams or tokens, or run with a "
            "larger pool"
        )
