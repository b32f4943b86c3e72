"""A small engine without a model whose layers keep state of every kind: all rows, a window of them, latent rows, and a
recurrent state.

It is an example of a connector for models of several layer groups: one resume point for all, and of each group the
blocks that it needs there. Each number is computed from the state *as it is in memory*, as a model would: one wrong or
missing part of it changes the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_client import Fingerprint, LayerGroup, Session, StatePart, connect
from kvstore_client.testing.setting import EngineSetting, PromptResult

BLOCK_TOKENS = 64
WINDOW = 100  # the last 99 rows: two blocks
FULL, SLIDING, LATENT, RECURRENT = range(4)
GROUPS = (
    LayerGroup(FULL, "full", layers=(0,), bytes_per_token_per_layer=8),
    LayerGroup(SLIDING, "sliding", WINDOW, layers=(1,), bytes_per_token_per_layer=8),
    LayerGroup(LATENT, "latent", layers=(2,), parts=(StatePart("latent", "u8", (16,)), StatePart("rope", "u8", (8,)))),
    LayerGroup(
        RECURRENT, "recurrent", layers=(3,), parts=(StatePart("conv", "u8", (8,)), StatePart("ssm", "u8", (8,)))
    ),
)
DEADLINE_S = 2.0
_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Rows = npt.NDArray[np.uint64]


class KindsEngine:
    """A small engine for tests, without a model, whose layers keep state of four kinds: full rows, a window of rows,
    latent rows, and a recurrent state. It stores and restores the state through `session`. If `session` is None, it
    computes every prompt.
    """

    def __init__(self, model: str, session: Session | None) -> None:
        self._seed = int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "little")
        self._session = session
        self._begin(0)

    def _begin(self, tokens: int) -> None:
        """Make room for a prompt; nothing in it is computed yet."""
        self.rows: Rows = np.zeros((3, tokens), np.uint64)  # of the full and the sliding layer, and rotated ones
        self.latent: Rows = np.zeros((tokens, 2), np.uint64)
        self.conv, self.ssm = 0, self._seed  # the recurrent state
        self._states: dict[int, tuple[int, int]] = {}  # by the number of tokens before them

    def store(self, tokens: Sequence[int]) -> None:
        self._begin(len(tokens))
        self._compute(tokens, 0)
        if self._session is None:
            return
        for group in GROUPS:
            payloads = [self.gather(group.group_id, block) for block in range(len(tokens) // BLOCK_TOKENS)]
            self._session.put(tokens, payloads=payloads, group=group.group_id)

    def restore(self, tokens: Sequence[int]) -> PromptResult:
        self._begin(len(tokens))
        restored = self._load(tokens)
        if not restored:
            self._begin(len(tokens))  # without what was copied before something failed
        self._compute(tokens, restored)
        kept = self.rows[SLIDING, max(len(tokens) - (WINDOW - 1), 0) :]
        whole = b"".join(
            [self.rows[FULL].tobytes(), kept.tobytes(), self.rows[LATENT].tobytes(), self.latent.tobytes()]
        )
        return PromptResult(restored, hashlib.blake2b(whole + bytes(f"{self.conv} {self.ssm}", "ascii")).hexdigest())

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _load(self, tokens: Sequence[int]) -> int:
        """Copy what is stored of each layer's state. Return the number of tokens that it stands for."""
        if self._session is None:
            return 0
        most = (len(tokens) - 1) // BLOCK_TOKENS  # the last token is computed in any case: it starts the answer
        point = self._session.resume_point(tokens, max_blocks=most)
        for group in GROUPS:
            needed = self.needed(group, point.blocks)
            with self._session.get(
                tokens, group=group.group_id, first_block=needed.start, max_blocks=len(needed)
            ) as lease:
                for place, block in enumerate(needed[: len(lease)]):
                    self.scatter(group.group_id, block, lease.payload(place))
                if len(lease) < len(needed) or not lease.valid:  # asked after the copy
                    return 0
        return point.tokens

    def needed(self, group: LayerGroup, boundary: int) -> range:
        return group.needed_blocks(boundary, BLOCK_TOKENS)

    def _compute(self, tokens: Sequence[int], start: int) -> None:
        """Compute tokens[start:], each from what is kept of the ones before it."""
        for at in range(start, len(tokens)):
            token = int(tokens[at]) ^ self._seed
            window = self.rows[SLIDING, max(at - (WINDOW - 1), 0) : at]
            before = int(self.rows[LATENT, :at].sum(dtype=np.uint64)) ^ int(self.latent[:at].sum(dtype=np.uint64))
            self.rows[FULL, at] = _mixed(int(self.rows[FULL, :at].sum(dtype=np.uint64)) ^ token)
            self.rows[SLIDING, at] = _mixed(int(window.sum(dtype=np.uint64)) + 3 ^ token)
            self.rows[LATENT, at], self.latent[at] = _mixed(before + 5 ^ token), _mixed(before + 7 ^ token)
            self.conv, self.ssm = _mixed(self.conv ^ token), _mixed(self.ssm + self.conv ^ token)
            if (at + 1) % BLOCK_TOKENS == 0:
                self._states[at + 1] = self.conv, self.ssm

    def gather(self, group: int, block: int) -> npt.NDArray[np.uint8]:
        """Return the payload of block number `block` of the last prompt, in the layer group `group`, as bytes in a
        uint8 array.
        """
        here = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        if group == RECURRENT:
            return np.array(self._states[here.stop], np.uint64).view(np.uint8)
        if group == LATENT:
            return np.concatenate([self.latent[here].reshape(-1), self.rows[LATENT, here]]).view(np.uint8)
        return self.rows[group, here].view(np.uint8)

    def scatter(self, group: int, block: int, payload: npt.NDArray[np.uint8]) -> None:
        """Copy `payload` into the engine's state, as block number `block` of the layer group `group`."""
        here, numbers = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS), payload.view(np.uint64)
        if group == RECURRENT:
            self.conv, self.ssm = (int(number) for number in numbers)
        elif group == LATENT:
            self.latent[here] = numbers[: 2 * BLOCK_TOKENS].reshape(-1, 2)
            self.rows[LATENT, here] = numbers[2 * BLOCK_TOKENS :]
        else:
            self.rows[group, here] = numbers


def _mixed(number: int) -> int:
    number = (number & _MASK) * _PRIME & _MASK
    return number ^ number >> 29


def open_kinds_engine(setting: EngineSetting) -> KindsEngine:
    """Return an engine with layers of every kind for `setting`, connected to the daemon in `setting.socket_dir` if that
    is given.
    """
    if setting.socket_dir is None:
        return KindsEngine(setting.model, None)
    model = Fingerprint(
        f"kinds {setting.model}", weights_digest=f"kinds {setting.model}", kv_dtype="u64",
        block_tokens=BLOCK_TOKENS, engine_block_tokens=BLOCK_TOKENS, groups=GROUPS,
    )  # fmt: skip
    session = connect(
        setting.socket_dir, fingerprint=model, client_name="kinds-engine", connect_timeout_s=DEADLINE_S,
        deadline_s=DEADLINE_S, staging_bytes=1 << 20,
    )  # fmt: skip
    return KindsEngine(setting.model, session)
