"""The cache that a user gives to `generate`: a `DynamicCache` that restores and stores through the daemon.

It owns the state of one sequence: the tokens it holds, whether it may still be stored, and the restored tokens. The
store never fails a generation, and delays it at most by the deadline of one question: a failure becomes a reason in
`report`, and the model computes. Invariant: blocks are stored only while the tokens seen are exactly the tokens held.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvstore_client.errors import invalid
from kvstore_client.paths import costs_file
from kvstore_client.receipt import PRESENT, STORED
from kvstore_client.session import Session
from kvstore_connectors.moments import ComputeTimes, Moment
from kvstore_connectors.transformers.calls import Call, listen, shifted_positions, shorten, tokens_to_compute, why_not
from kvstore_connectors.transformers.copies import BlockCopies
from kvstore_connectors.transformers.fingerprint import difference, difference_now, inner_model, kv_shape, written_file
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.restore import ENDED, Restored, Wanted, is_silent, restore
from kvstore_connectors.transformers.self_test import failure_of, prove
from kvstore_connectors.transformers.sessions import copies_of, shared_session
from kvstore_connectors.transformers.storer import CacheReport, Computed, Sequence, Tokens, storer_of
from kvstore_proto.token_ids import checked_tokens
from kvstore_restore.choice import LoadChoice

DEFAULT_DEADLINE_S = 0.025  # a lease on what is mapped takes 1 ms; a stopped daemon must not cost 5 % of a prompt
_CHANGED = "the model has changed since the session was opened"

_choices: WeakKeyDictionary[PreTrainedModel, LoadChoice] = WeakKeyDictionary()


def choice_of(model: PreTrainedModel, session: Session) -> LoadChoice:
    """Return the record of costs of a model object. Each object has its own, since two models of one fingerprint may be
    on different devices. It begins with the costs that an earlier process saved.
    """
    found = _choices.get(model)
    if found is None:
        found = _choices[model] = LoadChoice.load(costs_file(session.fingerprint.digest()))
        session.before_close(found.save)
    return found


class KVStoreCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """The cache of one sequence: `model.generate(input_ids, past_key_values=KVStoreCache(session, model))`.

    `session` is the result of `kvstore_session(model)`, or the daemon's socket directory. In `generate` the longest
    stored prefix is restored and the rest computed; full blocks of prompt and answer are stored in the background. The
    cache may be given to `generate` again to go on with its sequence.

    A call that is no plain continuation of one sequence (a batch, padding, embeddings, custom positions) is computed as
    with a `DynamicCache`, and so is everything after it. A call that asks for all logits is computed whole, and stored;
    call `restore` before it to restore its prefix. `deadline_s` bounds the time of asking the daemon. A prefix that is
    expected to be computed faster than loaded is computed, unless `always_load`. `copies`: the way blocks get into the
    tensors and out of them, by default the one for the model's device.

    Raises KVStoreError(INVALID) for a model whose state cannot be stored, for a session of another model, and for
    copies whose payload layout differs from the session's.
    """

    _stack: KVStack
    _sequence: Sequence
    _seen: list[torch.Tensor]  # read only when a block is full: on a GPU each reading waits for it
    _count: int  # tokens seen, and held as long as nothing is refused
    _coming: torch.Tensor | None  # the tokens of the call that runs
    _called: Moment | None  # when that began, of a prompt
    _whole: Call  # the call that runs, before it was shortened
    _before: tuple[int, int]  # tokens held, and restored, before that
    _asks: bool
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
        copies: BlockCopies | None = None,
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
        self._copies = copies or copies_of(session, inner)
        if self._copies.layout != (layout := session.fingerprint.layout):
            raise invalid(
                f"these copies make payloads laid out as {self._copies.layout}, and the session's are {layout}"
            )
        self._device = inner.device
        self._choice = None if always_load else choice_of(inner, session)
        self._times = ComputeTimes(self._choice)
        self._shape = kv_shape(inner)
        super().__init__(config=inner.config)
        self._begin_anew()
        listen(inner, self)

    @property
    def report(self) -> CacheReport:
        """The tokens of this sequence that were restored, computed and stored so far, and the reasons why no more
        were.
        """
        sequence = self._sequence
        return CacheReport(
            restored_tokens=self._restored_tokens,
            computed_tokens=self._count - self._restored_tokens,
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
        """Restore the stored prefix of these tokens, without the last token; return how many tokens the cache holds
        now.

        For users who call the model themselves: `n = cache.restore(ids); model(ids[:, n:], past_key_values=cache)`.
        """
        if not self._settle():  # the last call was interrupted
            self._go_back()
        held = int(self.get_seq_length())
        if self._refused or not self._holds_all() or input_ids.shape[0] != 1 or input_ids.shape[1] <= held:
            return held
        tokens = _as_tokens(input_ids)
        if not np.array_equal(tokens[:held], self._tokens()):
            raise invalid(f"the cache holds {held} tokens that these do not begin with")
        if reason := self._unfit() or self._changed():
            self._refuse(reason)
            return held
        self._take(self._restore(tokens, len(tokens) - 1, beside=False), tokens)
        return self._count

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the blocks that this session's caches announced are stored or given up."""
        return storer_of(self._session).flush(timeout_s)

    # What the model's hooks call.

    def before(self, call: Call) -> Call:
        """Prepare a call of the model with this cache: restore its stored prefix, if that is allowed. Raises
        KVStoreError(INVALID) if the caller counts on tokens that an interrupted call did not get.
        """
        self._coming = None
        self._times.report()
        if not self._settle():  # no exception that torch catches: `after` was not called
            self._go_back()
            raise invalid(
                f"the last call with this cache was interrupted, which holds {self._count} tokens now: {ENDED}"
            )
        self._whole = {}
        if self._refused or not self._may_go_on(call):
            return call
        self._whole, self._before = call, (self._count, self._restored_tokens)
        ids = call["input_ids"]
        count = ids.shape[1]
        if count > 1:
            keep = tokens_to_compute(call)
            if keep is None:
                self._reason = "logits of all tokens were asked for"
            elif count > keep:
                tokens = np.concatenate([self._tokens(), _as_tokens(ids)])
                held = self._count
                self._take(self._restore(tokens, held + count - keep, beside=True), tokens)
                ids, call = ids[:, self._count - held :], shorten(call, self._count - held)
        self._coming, self._called = ids, self._copies.moment() if count > 1 else None
        return call

    def after(self, output: Any) -> Any:
        """Finish a call: its tokens are held now, and full blocks may be stored. Return the call's `output`. A call
        that raised (`output` is None) leaves the sequence as it was before.
        """
        coming, self._coming = self._coming, None
        whole, self._whole = self._whole, {}  # it names this cache: a cycle would keep K and V
        if output is None and whole:
            self._settle()
            self._go_back()
        if output is None or coming is None:
            return output
        if not self._settle():
            return self._again(whole)
        count = coming.shape[1]
        if self._called is not None:
            self._times.ended(self._count, count, self._called, self._copies.moment())
        self._seen.append(coming.clone())
        self._count += count
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
        """Cut the sequence as `DynamicCache.crop` does. Stored blocks stay stored; the sequence goes on from the
        shorter prefix.
        """
        kept = self._count + min(tokens_to_remove, 0)
        whole = not self._refused and self._holds_all()
        if not whole or kept < self._sequence.wanted_blocks * self._session.block_tokens or tokens_to_remove > 0:
            super().crop(tokens_to_remove)
            self._refuse("the sequence was cut back into blocks that are stored")
            return
        tokens = self._tokens()[:kept]
        self._seen, self._count = [torch.from_numpy(tokens)[None]], kept
        self._sequence.done_blocks = min(self._sequence.done_blocks, kept // self._session.block_tokens)
        self._restored_tokens = min(self._restored_tokens, kept)
        self._stack.extend_to(kept)

    def reset(self) -> None:
        """Forget the sequence; the next call begins a new one, which may be restored."""
        self._settle()
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
        copy = DynamicCache(config=self._inner.config)
        for index, layer in enumerate(self.layers):
            if layer.get_seq_length():
                copy.update(deepcopy(layer.keys, memo), deepcopy(layer.values, memo), index)
        return copy

    def _begin_anew(self) -> None:
        self._stack = KVStack(self._shape, self._copies)
        self.layers = list(self._stack.layers)
        self._sequence = Sequence(self._session, self._copies)
        self._seen = []
        self._count = 0
        self._coming = None
        self._called = None
        self._whole, self._before = {}, (0, 0)
        self._asks = True
        self._refused = self._reason = ""
        self._restored_tokens = self._restored_bytes = 0
        self._lookup_s = self._restore_s = 0.0

    def _may_go_on(self, call: Call) -> bool:
        reason = why_not(call, self._count)
        if not reason and not self._holds_all():
            reason = "tokens were computed in calls that this cache did not see"
        reason = reason or self._unfit()
        if not reason:
            reason = self._changed() if call["input_ids"].shape[1] > 1 else self._changed_now()
        if reason:
            self._refuse(reason)
        return not reason

    def _holds_all(self) -> bool:
        """Return whether each layer, and no other, has exactly the tokens seen. A layer that the model does not fill
        would be stored with uninitialised memory.
        """
        return len(self.layers) == len(self._stack.layers) and self._stack.holds(self._count)

    def _unfit(self) -> str:
        """Return why K/V of this model cannot be stored or restored now; "" if they can."""
        if self._inner.device != self._device:
            return "the model has been moved to another device"
        if self._inner.training:
            return "the model is in training mode: model.eval()"
        if self._count == 0 and len(set(getattr(self._inner, "hf_device_map", {}).values())) > 1:
            return "the model's layers are on several devices"
        return shifted_positions(self._inner)

    def _changed(self) -> str:
        """Return why the model is no longer the session's model; "" if it is. This takes too long to be called for each
        token.
        """
        if differs := difference(self._session.fingerprint, self._model):
            return f"{_CHANGED}: {differs}"
        if written := written_file(self._inner):
            return f"{written}, from which weights are mapped, was written to: load the model again"
        return failure_of(self._inner, self._session.block_tokens)

    def _changed_now(self) -> str:
        """Return the changes of `_changed` that can be seen before each token: weights that were written to, other
        adapters.
        """
        differs = difference_now(self._session.fingerprint, self._model)
        return f"{_CHANGED}: {differs}" if differs else ""

    def _settle(self) -> bool:
        """Finish the copy that ran beside the last call, if there was one; return whether it copied the leased
        bytes.
        """
        copying, self._stack.coming = self._stack.coming, None
        return copying is None or copying.finish()

    def _again(self, whole: Call) -> Any:
        """Run the call again from its beginning: the tokens restored for it cannot be trusted."""
        self._go_back()
        self._asks, self._reason = False, ENDED
        return self._inner(**whole)

    def _go_back(self) -> None:
        """Go back to the tokens held before the last call. Some layers may hold more."""
        held, self._restored_tokens = self._before
        self._seen = [torch.from_numpy(self._tokens()[:held])[None]]
        self._count = held
        if self._stack.tensor is not None:
            self._stack.extend_to(held)
        self._sequence.done_blocks = min(self._sequence.done_blocks, held // self._session.block_tokens)

    def _restore(self, tokens: Tokens, most: int, *, beside: bool) -> Restored:
        wanted = Wanted(tokens, self._count, most, self._session.block_tokens, self._inner.device)
        if not self._asks:
            return Restored(self._count, reason=self._reason)
        if not wanted.blocks:
            return Restored(self._count, reason="no full block to restore")
        try:
            return restore(self._session, self._stack, wanted, self._choice, deadline_s=self._deadline_s, beside=beside)
        except Exception as error:  # the store must not end a generation
            return Restored(self._count, reason=f"restoring failed: {type(error).__name__}: {error}")

    def _take(self, restored: Restored, tokens: Tokens) -> None:
        """Record the restored part of `tokens`."""
        if restored.tokens > self._count:
            self._seen.append(torch.from_numpy(tokens[self._count : restored.tokens])[None])
            self._restored_tokens += restored.tokens - self._count
            self._count = restored.tokens
        self._sequence.done_blocks = max(self._sequence.done_blocks, restored.blocks)
        self._restored_bytes += restored.bytes
        self._lookup_s += restored.lookup_s
        self._restore_s += restored.restore_s
        self._reason = restored.reason
        self._asks = self._asks and not is_silent(restored)

    def _store(self) -> None:
        sequence, blocks = self._sequence, self._count // self._session.block_tokens
        tensor = self._stack.tensor
        if tensor is None or sequence.reason or blocks <= max(sequence.wanted_blocks, sequence.done_blocks):
            return
        if written := written_file(self._inner):
            self._refuse(f"{written}, from which weights are mapped, was written to while they computed")
            return
        if self._session.state != "connected":
            return  # the blocks are announced with a later one, if the daemon comes back meanwhile
        tokens = self._tokens()[: blocks * self._session.block_tokens]
        storer_of(self._session).advance(sequence, Computed(tokens, tensor, blocks, self._copies.moment()))

    def _tokens(self) -> Tokens:
        """Return all tokens held, as one array."""
        if len(self._seen) > 1:
            self._seen = [torch.from_numpy(np.concatenate([_as_tokens(ids) for ids in self._seen]))[None]]
        return _as_tokens(self._seen[0]) if self._seen else np.empty(0, np.int32)

    def _refuse(self, reason: str) -> None:
        """Stop storing and restoring, for `reason`: from now on the object is a plain DynamicCache."""
        self._refused = self._refused or reason
        self._stack.break_up()


def _as_tokens(ids: torch.Tensor) -> Tokens:
    return checked_tokens(ids[0])
