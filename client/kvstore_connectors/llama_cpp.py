"""A shared, persistent cache for llama-cpp-python: `llm.set_cache(KVStoreLlamaCache(llm))`.

The module maps a `Llama`'s saved state to stored blocks (`llama_state` cuts and joins the bytes) and makes the
fingerprint of a loaded model, which includes a sketch of its computed values (`llama_probe`). A completion's state is
stored as a chain of blocks. The next prompt, in any process, restores the longest stored run that it shares, if that is
expected to be faster than computing it.

A completion never fails because of the cache: a state that cannot be restored is a KeyError, which means a miss, and a
state that cannot be stored is counted. Nothing is unpickled, and llama.cpp gets only bytes of the shape that this model
itself saves. Invariants: a cache serves the one model it was made for; it stores only tokens that the model was seen to
evaluate (`llama_probe`), and only while the weights' file is the one that was digested (`weight_files`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.entry import connect
from kvstore_client.paths import costs_file
from kvstore_client.receipt import PutReceipt
from kvstore_client.session import Session
from kvstore_connectors.llama_state import SavedState, StateUnsupported, assemble_state
from kvstore_connectors.load import Leased, PromptToLoad, lease_by_choice, lease_groups_by_choice
from kvstore_proto.errors import KVStoreError
from kvstore_proto.token_ids import checked_tokens
from kvstore_restore.choice import LoadChoice

try:
    import llama_cpp
    from llama_cpp.llama import LlamaState
    from llama_cpp.llama_cache import BaseLlamaCache
except ImportError as missing:
    raise ImportError(
        f"kvstore_connectors.llama_cpp needs llama-cpp-python: pip install llama-cpp-python ({missing})"
    ) from None

from kvstore_connectors.llama_identity import (
    BLOCK_TOKENS,
    STATE_GROUP,
    WINDOW_GROUP,
    fingerprint_of,
    loaded_files,
)
from kvstore_connectors.llama_probe import (
    may_cut,
    parsed,
    probed_state,
    seen_in,
    take_state,
    watch,
    why_not_restorable,
)

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0  # once, beside a model that has been loading for longer
DEADLINE_S = 0.25
_NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, np.int32)


class KVStoreLlamaCache(BaseLlamaCache):  # type: ignore[misc]  # llama_cpp has no types
    """A cache for one `llama_cpp.Llama` that stores its state in the daemon, for `llm.set_cache`. `socket` and
    `options`, such as `pool` and `required`, go to `kvstore_client.connect`.

    `weights_digest` saves a pass over the model's file if a digest is known; it must differ for different weights, and
    the caller then answers for the file. `deadline_s` bounds the time of asking the daemon for a prompt. A prefix that
    is expected to be computed faster than loaded is computed, unless `always_load`. `self_test`: the model first
    computes a short prompt whole and from a restored block, and is refused if the answers differ. Raises ValueError, in
    one line, for a model whose state cannot be cut into blocks, and for a file that may not be the one that was loaded.
    """

    def __init__(
        self,
        llm: llama_cpp.Llama,
        socket: str | os.PathLike[str] | None = None,
        *,
        weights_digest: str = "",
        block_tokens: int = BLOCK_TOKENS,
        deadline_s: float = DEADLINE_S,
        always_load: bool = False,
        self_test: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if llm._logits_all:
            raise ValueError("a model opened with logits_all=True needs scores of all tokens, which are not stored")
        self._llm = llm
        self._evaluated = watch(llm)
        try:
            probed = probed_state(llm)
            failure = why_not_restorable(llm, block_tokens) if self_test else ""
        except StateUnsupported as error:
            failure = str(error)
        if failure:
            raise ValueError(f"the state of this model cannot be stored in blocks: {failure}")
        self._shape = probed.shape
        if probed.recurrent is not None:
            self._evaluated.block_tokens = block_tokens
        self._weights = loaded_files(llm, is_named=bool(weights_digest))
        self.fingerprint = fingerprint_of(llm, probed, weights_digest or self._weights.digest(), block_tokens)
        if changed := self._weights.changed():
            raise ValueError(f"{changed} was written to while it was digested: open the model again")
        self._block_tokens = block_tokens
        self._session: Session = connect(
            socket,
            fingerprint=self.fingerprint,
            client_name="llama-cpp-python",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            deadline_s=deadline_s,
            **options,
        )
        self._deadline_s = deadline_s
        self._choice = None if always_load else LoadChoice.load(costs_file(self.fingerprint.digest()))
        if self._choice is not None:
            self._session.before_close(self._choice.save)
        self._prompts = PromptClock(llm)
        self.restored_tokens = 0  # by the latest look-up
        self._asked_tokens = _NO_TOKENS  # the latest prompt, while its answer is not stored
        self.last_receipt = ""  # what became of the latest store, in words

    @property
    def session(self) -> Session:
        return self._session

    @property
    def cache_size(self) -> int:
        """The bytes that this process has stored through this cache; the operator limits the size of the store."""
        return self._session.statistics().bytes_stored

    def __contains__(self, key: Sequence[int]) -> bool:
        try:
            blocks = self._restorable_at_most(key)
            return blocks > 0 and self._session.resume_point(self._tokens(key), max_blocks=blocks).blocks > 0
        except KVStoreError:
            return False

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Bring the longest prefix of `key` that is stored and worth loading into the model, if it is longer than the
        prefix that the model holds.

        The returned state describes the model's new contents, so that `Llama` loads nothing itself: its own
        `load_state` would also fill a matrix of scores that nothing reads, which takes longer than the restore.
        """
        self.restored_tokens = 0
        self._asked_tokens = tokens = self._tokens(key)
        blocks = self._restorable_at_most(key)
        held = llama_cpp.Llama.longest_token_prefix(self._llm._input_ids.tolist(), key)
        held = held if may_cut(self._llm, min(held, len(key) - 1)) else 0
        try:
            if changed := self._weights.changed():
                raise KeyError(_changed(changed))
            if blocks * self._block_tokens <= held:
                raise KeyError("the model itself holds as much of this prompt")
            self._bring(PromptToLoad(tokens, len(tokens), blocks, held // self._block_tokens), held)
        except KVStoreError as error:  # a closed session, a request that the daemon refuses
            raise KeyError(f"the store refused: {error}") from None
        finally:
            self._prompts.start()
        return _Current(self._llm)

    def _bring(self, prompt: PromptToLoad, held: int) -> None:
        """Load blocks into the model, which holds `held` tokens. Raises KeyError if no longer prefix is stored, or none
        is worth loading.
        """
        if self._shape.window is not None or self._shape.recurrent_bytes:
            self._bring_groups(replace(prompt, held=0), held)
            return
        block_bytes = self._shape.token_bytes * self._block_tokens
        with lease_by_choice(
            self._session, prompt, self._choice, block_bytes=block_bytes, deadline_s=self._deadline_s
        ) as leased:
            count = leased.blocks * self._block_tokens
            if count <= held:
                leased.copied(leased.blocks)
                raise KeyError(f"nothing is loaded: {leased.reason or 'the prompt is new'}")
            state = self._assembled(leased)
            if state is None:
                raise KeyError("the lease ended while its blocks were copied")
            self._restore(prompt.tokens[:count], state)
            leased.copied(leased.blocks)

    def _bring_groups(self, prompt: PromptToLoad, held: int) -> None:
        """Load what a resume needs of each layer group into the model; see `_bring`."""
        with lease_groups_by_choice(self._session, prompt, self._choice, deadline_s=self._deadline_s) as leased:
            count = leased.blocks * self._block_tokens
            if count <= held or not leased.parts:
                raise KeyError(f"nothing is loaded: {leased.reason or 'the prompt is new'}")
            by_group = {
                group.group_id: [lease.payload(at) for at in range(len(blocks))]
                for group, blocks, lease in leased.parts
            }
            last = by_group.get(STATE_GROUP)
            state = assemble_state(
                self._shape,
                by_group.get(0, []),
                self._block_tokens,
                by_group.get(WINDOW_GROUP, []),
                (count, last[0]) if last else None,
            )
            if not leased.valid:
                raise KeyError("the lease ended while its blocks were copied")
            self._restore(prompt.tokens[:count], state)
            leased.copied(leased.blocks)

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store the full blocks of a state, except blocks that are already stored."""
        self._learn()
        if changed := self._weights.changed():
            self._not_stored(_changed(changed))
            return
        tokens = _seen_tokens(value)
        count = len(tokens) // self._block_tokens
        if not count:
            self.last_receipt = "no full block"
            if value.n_tokens >= self._block_tokens:
                self.last_receipt += " of tokens that the model was seen to evaluate (an image, or a state, is before)"
            return
        saved, refusal = self._parsed(value.llama_state)
        holds = saved is not None and (not saved.regions or saved.holds(count * self._block_tokens))
        if saved is not None and (saved.shape != self._shape or not holds):
            saved, refusal = None, "it is not that of these tokens, from the first on, in this model"
        if saved is None:
            self._not_stored(f"the state of {len(tokens)} tokens is not understood: {refusal}")
            return
        try:
            receipt: object = "no state at a boundary between blocks"
            if saved.regions:
                receipt = self._put(tokens, saved, range(count), 0)
            if saved.window is not None:
                self._put_window(tokens, saved.window, count)
            for position, state in getattr(value, "kvstore_states", {}).items():
                if position <= count * self._block_tokens:
                    receipt = self._put_state(tokens, position, state)
            asked, self._asked_tokens = self._asked_tokens, _NO_TOKENS  # what was looked up before it was answered
            if 0 < len(asked) < len(tokens) and np.array_equal(tokens[: len(asked)], asked):
                self._session.hint(tokens, answer_tokens=len(tokens) - len(asked))
        except KVStoreError as error:  # blocks too large for the daemon, a closed session: the answer is not at fault
            self._not_stored(f"the state of {len(tokens)} tokens was refused: {error}")
            return
        self.last_receipt = repr(receipt)

    def _put(self, tokens: npt.NDArray[np.int32], saved: SavedState, blocks: range, group: int) -> PutReceipt:
        """Store some blocks of a layer group."""
        size, nbytes = self._block_tokens, saved.shape.token_bytes * self._block_tokens
        payloads = [_Cut(saved, block * size, size) for block in blocks]
        return self._session.put(tokens, first_block=blocks.start, payloads=payloads, payload_bytes=nbytes, group=group)

    def _put_window(self, tokens: npt.NDArray[np.int32], saved: SavedState, count: int) -> None:
        """Store the blocks of windowed layers that are still there, run by run."""
        there = saved.whole_blocks(count, self._block_tokens)
        begin = 0
        for at, block in enumerate(there):
            if at + 1 == len(there) or there[at + 1] != block + 1:
                self._put(tokens, saved, range(there[begin], block + 1), WINDOW_GROUP)
                begin = at + 1

    def _put_state(self, tokens: npt.NDArray[np.int32], position: int, state: bytes) -> PutReceipt:
        """Store the state of recurrent layers at a boundary between blocks."""
        block = position // self._block_tokens - 1
        return self._session.put(
            tokens[:position], first_block=block, payloads=[state], payload_bytes=len(state), group=STATE_GROUP
        )

    def _parsed(self, data: bytes) -> tuple[SavedState | None, str]:
        try:
            return parsed(self._llm, data), ""
        except StateUnsupported as refused:
            return None, str(refused)

    def close(self) -> None:
        self._session.close()
        self._weights.close()

    def _not_stored(self, why: str) -> None:
        """Log `why` in one line, unless it equals the last line."""
        line = f"not stored: {why}"
        if line != self.last_receipt:
            log.warning("%s", line)
        self.last_receipt = line

    def _restorable_at_most(self, key: Sequence[int]) -> int:
        """Return the number of leading full blocks of a prompt that may be restored; its last token is always
        computed.
        """
        return min(len(key) - 1, int(self._llm.n_ctx())) // self._block_tokens

    def _tokens(self, key: Sequence[int]) -> npt.NDArray[np.int32]:
        return checked_tokens(key)

    def _learn(self) -> None:
        """Report the time that computing the latest prompt took, from the first token that was neither held nor
        restored.
        """
        tokens, seconds = self._prompts.stop()
        first = len(self._asked_tokens) - tokens
        if self._choice is not None and tokens and first >= 0:
            self._choice.observe_compute(first, tokens, seconds)

    def _assembled(self, leased: Leased) -> npt.NDArray[np.uint8] | None:
        """Return the saved state made of the chosen blocks; None if the lease had ended when it was read."""
        payloads = [leased.lease.payload(block) for block in range(leased.blocks)]
        state = assemble_state(self._shape, payloads, self._block_tokens)
        return state if leased.lease.valid else None

    def _restore(self, tokens: npt.NDArray[np.int32], state: npt.NDArray[np.uint8]) -> None:
        """Make `state` the model's state. If llama.cpp refuses it, the model holds nothing, and KeyError is raised."""
        llm = self._llm
        if not take_state(llm, state):
            llm.reset()
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm._ctx.ctx), True)
            raise KeyError("llama.cpp does not accept the stored state")
        llm.input_ids[: len(tokens)] = tokens
        llm.n_tokens = len(tokens)
        self._evaluated.restored(tokens)
        llm._requires_eval = True
        self.restored_tokens = len(tokens)


class PromptClock:
    """A clock that measures the time that a model takes for prompts, without the tokens of answers, by llama.cpp's
    counters. The counters stand still in a model that was opened with `no_perf=True`.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm
        self._started: tuple[int, float] | None = None

    def start(self) -> None:
        self._started = self._counted()

    def stop(self) -> tuple[int, float]:
        """Return the number of prompt tokens that the model computed since `start`, and the seconds that this took.
        Return zeros if the clock was not started, or the counters were reset.
        """
        started, self._started = self._started, None
        tokens, seconds = self._counted()
        if started is None or tokens <= started[0] or seconds <= started[1]:
            return 0, 0.0
        return tokens - started[0], seconds - started[1]

    def _counted(self) -> tuple[int, float]:
        counters = llama_cpp.llama_perf_context(self._llm._ctx.ctx)
        # llama.cpp says 1 token where there was none
        return int(counters.n_p_eval) if counters.t_p_eval_ms else 0, counters.t_p_eval_ms / 1e3


class _Cut:
    """A writer of one block of a saved state into shared memory."""

    def __init__(self, saved: SavedState, first: int, tokens: int) -> None:
        self._saved, self._first, self._tokens = saved, first, tokens

    def __call__(self, destination: npt.NDArray[np.uint8]) -> None:
        self._saved.write_block(self._first, self._tokens, destination)


class _Current(LlamaState):  # type: ignore[misc]
    """The present state of a model. Its bytes are made only if they are read."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm
        self.input_ids = llm.input_ids[: llm.n_tokens].copy()
        self.n_tokens = llm.n_tokens
        self.seed = llm._seed

    def __getattr__(self, name: str) -> Any:
        if name not in ("scores", "llama_state", "llama_state_size"):
            raise AttributeError(name)
        whole = self._llm.save_state()
        self.input_ids, self.n_tokens = whole.input_ids, whole.n_tokens
        self.scores, self.llama_state, self.llama_state_size = whole.scores, whole.llama_state, whole.llama_state_size
        return self.__dict__[name]


def _seen_tokens(state: LlamaState) -> npt.NDArray[np.int32]:
    """Return the leading tokens that the state names and that the model was seen to evaluate."""
    named, seen = checked_tokens(state.input_ids[: state.n_tokens]), seen_in(state)
    shared = min(len(named), len(seen))
    differs = np.flatnonzero(named[:shared] != seen[:shared])
    return named[: differs[0] if len(differs) else shared]


def _changed(path: str) -> str:
    return f"{path} was written to since the model was opened; nothing more is stored or restored: open it again"
