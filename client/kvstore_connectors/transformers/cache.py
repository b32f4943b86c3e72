"""The cache that a user gives to `generate`: a `DynamicCache` that restores and stores through the daemon.

It owns the state of one sequence: the tokens it holds, whether it may still be stored, and the restored tokens. The
store never fails a generation, and delays it at most by the deadline of one question: a failure becomes a reason in
`report`, and the model computes. Invariant: blocks are stored only while the tokens seen are exactly the tokens held.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvstore_client.errors import invalid
from kvstore_client.receipt import PRESENT, STORED
from kvstore_client.session import Session
from kvstore_connectors.moments import ModelCallTimes, Moment
from kvstore_connectors.transformers import calls
from kvstore_connectors.transformers.calls import Call, TokensHeld, as_tokens, unfit, why_not
from kvstore_connectors.transformers.copies import TensorCopies
from kvstore_connectors.transformers.fingerprint import difference, inner_model, written_file
from kvstore_connectors.transformers.group_memory import GroupMemory
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.restore import ENDED, RestoredCache, Wanted, choice_of, is_silent, restore
from kvstore_connectors.transformers.self_test import changed, changed_now, prove
from kvstore_connectors.transformers.sessions import copies_of, shared_session
from kvstore_connectors.transformers.state import KVShape, state_of
from kvstore_connectors.transformers.storer import CacheReport, ComputedBlocks, SequenceToStore, Tokens, storer_of

DEFAULT_DEADLINE_S = 0.025  # a lease on what is mapped takes 1 ms; a stopped daemon must not cost 5 % of a prompt
_LOST = "the last call with this cache was interrupted, and the state of this model cannot go back: make a new cache"


class KVStoreCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A Transformers cache of one sequence that restores stored prefixes and stores new blocks in the daemon. Use it as
    `model.generate(input_ids, past_key_values=KVStoreCache(session, model))`.

    `session` is the result of `kvstore_session(model)`, or the daemon's socket directory. In `generate` the longest
    stored prefix is restored and the rest computed; full blocks of prompt and answer are stored in the background. The
    cache may be given to `generate` again to go on with its sequence.

    A prompt of a model with recurrent states is computed in passes that end at the ends of blocks, where states are
    stored. A cache with states or windows can be gone on with after a call that raised only if it held nothing before.

    A call that is no plain continuation of one sequence (a batch, padding, embeddings, custom positions) is computed as
    with a `DynamicCache`, and so is everything after it. A call that asks for all logits is computed whole, and stored;
    call `restore` before it to restore its prefix. `deadline_s` bounds the time of asking the daemon. A prefix that is
    expected to be computed faster than loaded is computed, unless `always_load`. `copies`: the way blocks get into the
    tensors and out of them, by default the one for the model's device.

    Raises KVStoreError(INVALID) for a model whose state cannot be stored, for a session of another model, and for
    copies whose payload layout differs from the session's.
    """

    _memory: KVStack | GroupMemory
    _sequence: SequenceToStore
    _seen: TokensHeld  # and held as long as nothing is refused
    _coming: torch.Tensor | None  # the tokens of the call that runs
    _called: Moment | None  # when that began, of a prompt
    _whole: Call  # the call that runs, before it was shortened
    _before: tuple[int, int]  # tokens held, and restored, before that
    _asks: bool
    _is_cutting: bool
    _is_lost: bool
    _refused: str
    _reason: str
    _restored_tokens: int
    _restored_bytes: int
    _lookup_s: float
    _restore_s: float

    def __init__(
        self,
        session: Session | str | os.PathLike[str],
        model: Any,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        always_load: bool = False,
        copies: TensorCopies | None = None,
    ) -> None:
        inner = inner_model(model)
        if not isinstance(session, Session):
            session = shared_session(session, model)
        elif differs := difference(session.fingerprint, model):
            raise invalid(f"the session was opened for another model or another state of it: {differs} differ")
        prove(inner, session.block_tokens)
        if session.state != "closed":
            session.wake()
        self._session = session
        self._model = model
        self._inner = inner
        self._deadline_s = deadline_s
        self._state = state_of(inner)
        self._copies = copies or copies_of(session, inner)
        if isinstance(self._state, KVShape) and self._copies.layout != (layout := session.fingerprint.layout):
            raise invalid(
                f"these copies make payloads laid out as {self._copies.layout}, and the session's are {layout}"
            )
        self._device = inner.device
        self._choice = None if always_load else choice_of(inner, session)
        self._times = ModelCallTimes(self._choice)
        super().__init__(config=inner.config)
        self._begin_anew()
        calls.listen(inner, self)

    @property
    def report(self) -> CacheReport:
        """The report about this sequence: how many tokens were restored, computed and stored so far, and the reasons
        why no more were.
        """
        sequence = self._sequence
        return CacheReport(
            restored_tokens=self._restored_tokens,
            computed_tokens=self._seen.count - self._restored_tokens,
            restored_bytes=self._restored_bytes,
            lookup_s=self._lookup_s,
            restore_s=self._restore_s,
            reason=self._refused or self._reason,
            stored_blocks=sequence.statuses[STORED],
            present_blocks=sequence.statuses[PRESENT],
            waiting_blocks=sequence.waiting_blocks,
            store_reason=self._refused or sequence.reason,
        )

    def restore(self, input_ids: torch.Tensor) -> int:
        """Restore the stored prefix of `input_ids`, without the last token, and return the number of tokens that the
        cache holds now.

        For users who call the model themselves: `n = cache.restore(ids); model(ids[:, n:], past_key_values=cache)`.
        """
        if not self._memory.settle():  # the last call was interrupted
            self._go_back()
        held = int(self.get_seq_length())
        if self._refused or not self._holds_all() or input_ids.shape[0] != 1 or input_ids.shape[1] <= held:
            return held
        tokens = as_tokens(input_ids)
        if not np.array_equal(tokens[:held], self._seen.all()):
            raise invalid(f"the cache holds {held} tokens that these do not begin with")
        if reason := unfit(self._inner, self._device, self._seen.count) or changed(
            self._session.fingerprint, self._model
        ):
            self._refuse(reason)
            return held
        self._take(self._restore(tokens, len(tokens) - 1, beside=False), tokens)
        return self._seen.count

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks of this session's caches are stored or given up; False after `timeout_s` seconds."""
        return storer_of(self._session).flush(timeout_s)

    # What the model's hooks call.

    def before(self, call: Call) -> Call:
        """Prepare the model's `call` with this cache: restore the stored prefix, and return the arguments of a call
        that computes only the other tokens. Raises KVStoreError(INVALID) if `call` continues tokens that an interrupted
        call did not compute.
        """
        was_open, self._coming = self._coming is not None, None
        self._times.report()
        if not self._memory.settle():  # no exception that torch catches: `after` was not called
            self._go_back()
            raise invalid(
                f"the last call with this cache was interrupted, which holds {self._seen.count} tokens now: {ENDED}"
            )
        if self._is_lost or (was_open and not self._memory.can_go_back):
            self._is_lost = True
            raise invalid(_LOST)
        self._whole = {}
        if self._refused or not (self._is_cutting or self._may_go_on(call)):
            return call
        self._whole, self._before = call, (self._seen.count, self._restored_tokens)
        ids = call["input_ids"]
        count = ids.shape[1]
        if count > 1 and not self._is_cutting:
            keep = calls.tokens_to_compute(call)
            if keep is None:
                self._reason = "logits of all tokens were asked for"
            elif count > keep:
                tokens = np.concatenate([self._seen.all(), as_tokens(ids)])
                held = self._seen.count
                self._take(self._restore(tokens, held + count - keep, beside=True), tokens)
                call = self._cut(calls.shorten(call, self._seen.count - held), keep)
                ids = call["input_ids"]
        if self._seen.count and not isinstance(self._memory, KVStack):
            call = calls.with_positions(call, self._inner, self._seen.count)
        self._coming, self._called = ids, self._copies.moment() if count > 1 else None
        return call

    def _cut(self, call: Call, keep: int) -> Call:
        """Compute in pieces what comes before the last boundary that wants a state; return the rest of the call."""
        size = self._memory.cut_tokens
        if not size or self._session.state != "connected" or self._sequence.reason:
            return call
        # Said now: if a piece turns out not to be storable, those behind it are not seen any more.
        call = calls.with_positions(call, self._inner, self._seen.count)
        *first, rest = calls.pieces(call, self._seen.count, size, keep)
        if first and not self._memory.settle():  # behind a piece there would be no way back
            self._start_over()
            return self._cut(self._whole, keep)
        self._is_cutting = True
        try:
            for piece in first:
                self._inner(**piece)
        finally:
            self._is_cutting = False
        if first:
            self._whole = rest
        return rest

    def after(self, output: Any) -> Any:
        """Finish a call of the model: record its tokens as cached, and store its full blocks in the background. Return
        `output`, the result of the call. If `output` is None, the call raised, and the sequence stays as it was before.
        """
        coming, self._coming = self._coming, None
        whole, self._whole = self._whole, {}  # it names this cache: a cycle would keep K and V
        if output is None and whole:
            self._memory.settle()
            self._go_back()
        if output is None or coming is None:
            return output
        if not self._memory.settle():
            return self._again(whole)
        count = coming.shape[1]
        if self._called is not None:
            self._times.ended(self._seen.count, count, self._called, self._copies.moment())
        self._seen.add(coming.clone())
        if not self._holds_all():
            self._refuse("K/V of another shape, place or kind than the model's configuration says")
            return output
        try:
            self._store()
        except Exception as error:  # a mistake in storing must not end the model's forward pass
            self._refuse(f"storing failed: {type(error).__name__}: {error}")
        return output

    # What transformers does to caches.

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of the sequence, as `DynamicCache.crop` does with `tokens_to_remove`. Stored
        blocks stay stored, and the sequence goes on from the shorter prefix.
        """
        kept = self._seen.count + min(tokens_to_remove, 0)
        whole = not self._refused and self._holds_all() and self._memory.can_go_back
        if not whole or kept < self._sequence.wanted_blocks * self._session.block_tokens or tokens_to_remove > 0:
            self._is_lost = not self._memory.can_go_back  # if this raises, some layers are cut and others are not
            super().crop(tokens_to_remove)
            self._is_lost = False
            self._refuse("the sequence was cut back into blocks that are stored")
            return
        self._seen.cut(kept)
        self._sequence.done_blocks = min(self._sequence.done_blocks, kept // self._session.block_tokens)
        self._restored_tokens = min(self._restored_tokens, kept)
        self._memory.go_back(kept)

    def reset(self) -> None:
        """Forget the sequence; the next call begins a new one, which may be restored."""
        self._memory.settle()
        self._begin_anew()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._refuse("beams were reordered")
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("the batch was changed")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse("the batch was changed")
        super().batch_select_indices(indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        """Return a DynamicCache with this content and no link to the daemon."""
        if not self._memory.settle():  # the last call was interrupted
            self._go_back()
        copy = DynamicCache(config=self._inner.config)
        if isinstance(self._memory, GroupMemory):
            copy.layers = self._memory.plain_layers(self._inner.config, memo)
            return copy
        for index, layer in enumerate(self.layers):
            if layer.get_seq_length():
                copy.update(deepcopy(layer.keys, memo), deepcopy(layer.values, memo), index)
        return copy

    def _new_memory(self) -> None:
        if isinstance(self._state, KVShape):
            self._memory = KVStack(self._state, self._copies)
        else:
            self._memory = GroupMemory(self._state, self._inner.config, self._session.block_tokens)
        self.layers = list(self._memory.layers)

    def _begin_anew(self) -> None:
        self._new_memory()
        self._sequence = SequenceToStore(self._session)
        self._seen = TokensHeld()
        self._coming = None
        self._is_cutting = self._is_lost = False
        self._called = None
        self._whole, self._before = {}, (0, 0)
        self._asks = True
        self._refused = self._reason = ""
        self._restored_tokens = self._restored_bytes = 0
        self._lookup_s = self._restore_s = 0.0

    def _may_go_on(self, call: Call) -> bool:
        reason = why_not(call, self._seen.count)
        if not reason and not self._holds_all():
            reason = "tokens were computed in calls that this cache did not see"
        reason = reason or unfit(self._inner, self._device, self._seen.count)
        if not reason:
            is_prompt = call["input_ids"].shape[1] > 1
            reason = (changed if is_prompt else changed_now)(self._session.fingerprint, self._model)
        if reason:
            self._refuse(reason)
        return not reason

    def _holds_all(self) -> bool:
        """Return whether each layer, and no other, has exactly the tokens seen. A layer that the model does not fill
        would be stored with uninitialised memory.
        """
        return len(self.layers) == len(self._memory.layers) and self._memory.holds(self._seen.count)

    def _again(self, whole: Call) -> Any:
        """Run the call again from its beginning: the tokens restored for it cannot be trusted."""
        self._start_over()
        return self._inner(**whole)

    def _start_over(self) -> None:
        self._go_back()
        self._asks, self._reason = False, ENDED

    def _go_back(self) -> None:
        """Go back to the tokens held before the last call. Some layers may hold more."""
        held, restored = self._before
        if not self._take_back(held):
            return
        self._restored_tokens = restored
        self._seen.cut(held)
        self._sequence.done_blocks = min(self._sequence.done_blocks, held // self._session.block_tokens)

    def _restore(self, tokens: Tokens, most: int, *, beside: bool) -> RestoredCache:
        wanted = Wanted(tokens, self._seen.count, most, self._session.block_tokens, self._inner.device)
        if not self._asks:
            return RestoredCache(self._seen.count, reason=self._reason)
        if not wanted.blocks:
            return RestoredCache(self._seen.count, reason="no full block to restore")
        try:
            given = self._session, self._memory, wanted, self._choice
            return restore(*given, deadline_s=self._deadline_s, beside=beside)
        except Exception as error:  # the store must not end a generation
            if not self._holds_all() and not self._take_back(self._seen.count):
                raise invalid(_LOST) from error
            return RestoredCache(self._seen.count, reason=f"restoring failed: {type(error).__name__}: {error}")

    def _take_back(self, held: int) -> bool:
        """Let the memory hold the first `held` tokens alone. Return False, and refuse later calls, if it cannot."""
        if not held:
            self._new_memory()
        elif self._memory.can_go_back:
            self._memory.go_back(held)
        else:
            self._is_lost = True
            self._refuse(_LOST)
        return not self._is_lost

    def _take(self, restored: RestoredCache, tokens: Tokens) -> None:
        """Record the restored part of `tokens`."""
        if restored.tokens > self._seen.count:
            self._restored_tokens += restored.tokens - self._seen.count
            self._seen.add(torch.from_numpy(tokens[self._seen.count : restored.tokens])[None])
        self._sequence.done_blocks = max(self._sequence.done_blocks, restored.blocks)
        self._restored_bytes += restored.bytes
        self._lookup_s += restored.lookup_s
        self._restore_s += restored.restore_s
        self._reason = restored.reason
        self._asks = self._asks and not is_silent(restored)

    def _store(self) -> None:
        sequence, blocks = self._sequence, self._seen.count // self._session.block_tokens
        if sequence.reason or blocks <= max(sequence.wanted_blocks, sequence.done_blocks):
            return
        if written := written_file(self._inner):
            self._refuse(f"{written}, from which weights are mapped, was written to while they computed")
            return
        if self._session.state != "connected":
            return  # the blocks are announced with a later one, if the daemon comes back meanwhile
        moment, tokens = self._copies.moment(), self._seen.all()[: blocks * self._session.block_tokens]
        source = self._memory.blocks_until(self._seen.count, self._session.block_tokens, moment)
        if source is not None:
            storer_of(self._session).advance(sequence, ComputedBlocks(tokens, source, blocks, moment))

    def _refuse(self, reason: str) -> None:
        """Stop storing and restoring, for `reason`: from now on the object is a plain DynamicCache."""
        self._refused = self._refused or reason
        self._memory.break_up()
