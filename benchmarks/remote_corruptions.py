"""Is a value that was changed in a remote store ever served, and can the store's bytes be read?

20,000 corruptions (500 with --quick), half of encrypted and half of plain values, in a real redis or Valkey: flipped
bits anywhere, values of other blocks, values of another tenant's block of the same key, truncation, other versions.
Each is read through the tier; served means: the read ended well, and the payload differs from what was stored under
that name by that tenant. Then, with encrypted values in redis and in a directory: every key, file name and value is
searched for token ids, keys, tenants' digests and pieces of K/V.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' servers

import numpy as np
import redis
from support.report import Row, main, progress, within

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import Slot
from kvstore_tiers.keyed import KeyedTier
from kvstore_tiers.objects import object_name
from kvstore_tiers.remote.encryption import Sealer
from kvstore_tiers.remote.store import RemoteStore
from kvstore_tiers.segments import Bytes
from kvstore_tiers.testing.transfers import block, get, put
from tests.reference.remote_servers import redis_server

SECRET = bytes(range(32))
PAYLOAD_BYTES, BLOCKS, TOKENS = 20_000, 8, 64
TENANTS = (b"one".ljust(16, b"\0"), b"another".ljust(16, b"\0"))
Stored = tuple[BlockHeader, Bytes, Slot]


def measure(quick: bool) -> list[Row]:
    attempts = 250 if quick else 10_000
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvcorrupt-") as folder, redis_server(Path(folder)) as server:
        for plain in (False, True):
            kind = "plain" if plain else "encrypted"
            progress(f"{attempts:,} corruptions of {kind} values ...")
            with closing(redis.Redis.from_url(server.url)) as client:
                client.flushall()
                served, rejected = _corrupt(server.url, client, plain, attempts)
            progress(f"{kind}: {rejected:,} of {attempts:,} were rejected, the others changed nothing that is read")
            rows.append(within(f"{kind} values: corruptions served", served, "", 1e-9))
        with closing(redis.Redis.from_url(server.url)) as client:
            client.flushall()
            with _tier(server.url, plain=False) as tier:
                blocks = _store(tier)
            found = sum(_secrets_in(key + value, blocks) for key, value in _contents(client).items())
            rows.append(within("redis: secrets found in its contents", found, "", 1e-9))
    with tempfile.TemporaryDirectory(prefix="kvcorrupt-") as folder:
        with _tier(f"file://{folder}", plain=False) as tier:
            blocks = _store(tier)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        found = sum(_secrets_in(str(path).encode() + path.read_bytes(), blocks) for path in files)
        rows.append(within(f"directory: secrets found in its {len(files)} files", found, "", 1e-9))
    return rows


def _corrupt(url: str, client: redis.Redis, plain: bool, attempts: int) -> tuple[int, int]:
    """How many were served, and how many rejected."""
    draw, sealer = random.Random(attempts), Sealer(SECRET)
    served = rejected = 0
    with _tier(url, plain=plain) as tier:
        blocks = _store(tier)
        contents = _contents(client)
        keys = []
        for header, _, _ in blocks:
            name = sealer.value_name(object_name(header.tenant, header.key)).encode()
            keys.append(next(key for key in contents if key.endswith(name)))
        for attempt in range(attempts):
            at = draw.randrange(len(blocks))
            client.set(keys[at], _changed(draw, attempt % 5, at, [contents[key] for key in keys]))
            header, payload, slot = blocks[at]
            outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
            served += outcome.ok and not np.array_equal(copy, payload)
            rejected += not outcome.ok
            client.set(keys[at], contents[keys[at]])
            if attempt % 1000 == 999:
                progress(f"{attempt + 1:,} ...")
        for header, payload, slot in blocks:
            outcome, copy = get(tier, slot, header.key, PAYLOAD_BYTES)
            if not outcome.ok or not np.array_equal(copy, payload):
                raise RuntimeError(f"a sound value was not served: {outcome}")
    return served, rejected


def _changed(draw: random.Random, how: int, at: int, values: list[bytes]) -> bytes:
    value = bytearray(values[at])
    if how == 0:
        value[draw.randrange(len(value))] ^= 1 << draw.randrange(8)
    elif how == 1:
        return values[(at + 1 + draw.randrange(BLOCKS - 1)) % len(values)]
    elif how == 2:
        return values[(at + BLOCKS) % len(values)]  # the other tenant's block of the same key
    elif how == 3:
        del value[draw.randrange(len(value)) :]
    else:
        value[4] = draw.choice([version for version in range(256) if version != value[4]])
    return bytes(value)


def _store(tier: KeyedTier) -> list[Stored]:
    """Blocks of both tenants, of equal keys and other bytes."""
    stored = []
    for number, tenant in enumerate(TENANTS):
        for at in range(1, BLOCKS + 1):
            header, _ = block(at, PAYLOAD_BYTES, tokens=TOKENS)
            _, payload = block(1000 * number + at, PAYLOAD_BYTES)
            header = replace(header, tenant=tenant)
            slot = put(tier, header, payload)
            assert slot is not None
            stored.append((header, payload, slot))
    return stored


def _secrets_in(raw: bytes, blocks: list[Stored]) -> int:
    found = 0
    for header, payload, _ in blocks:
        whole = payload.tobytes()
        secrets = [header.key, header.tenant, header.fingerprint, header.tokens[:16], header.tokens[-16:]]
        secrets += [whole[offset : offset + 16] for offset in range(0, PAYLOAD_BYTES, 500)]
        found += sum(secret in raw or secret.hex().encode() in raw for secret in secrets if any(secret))
    return found


def _contents(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.get(key) for key in client.scan_iter()}  # type: ignore[misc]


@contextmanager
def _tier(url: str, *, plain: bool) -> Iterator[KeyedTier]:
    store = RemoteStore(
        "remote", url, secret=SECRET, is_plain=lambda _digest: plain, timeout_s=5.0, exchange_bytes=16 << 20,
        credentials={},
    )  # fmt: skip
    with closing(KeyedTier(store, 64 << 20)) as tier:
        yield tier


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
