"""Other clients at full rate: each puts a conversation, gets it back, and goes on to the next one.

Owns child processes, so that their work competes with the measuring client for cores and for the daemon, as engines do,
and not for its interpreter. The host tier of the daemon should be small, so that every put has to evict.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import kvstore_client
from support.blocks import model, payloads, tokens_of

START_TIMEOUT_S = 30.0
BLOCKS_A_PUT = 8


@contextmanager
def full_load(socket_dir: Path, block_bytes: int, clients: int = 2) -> Iterator[None]:
    """`clients` processes put and get without pause while the context lasts. Raises RuntimeError if one has failed."""
    spawning = multiprocessing.get_context("spawn")
    stop = spawning.Event()
    going = [spawning.Event() for _ in range(clients)]
    children = [
        spawning.Process(target=_work, args=(socket_dir, block_bytes, number, going[number], stop), daemon=True)
        for number in range(clients)
    ]
    for child in children:
        child.start()
    try:
        if not all(event.wait(START_TIMEOUT_S) for event in going):
            raise RuntimeError("a load client did not get going")
        yield
        if not all(child.is_alive() for child in children):
            raise RuntimeError("a load client ended before the measurement did")
    finally:
        stop.set()
        for child in children:
            child.join(START_TIMEOUT_S)


def _work(socket_dir: Path, block_bytes: int, number: int, going: Event, stop: Event) -> None:
    data = payloads(BLOCKS_A_PUT, block_bytes)
    conversation = number
    fingerprint = model(block_bytes, f"load {number}")
    with kvstore_client.connect(socket_dir, fingerprint=fingerprint, required=True, deadline_s=10.0) as session:
        while not stop.is_set():
            tokens = tokens_of(conversation % 2000, BLOCKS_A_PUT)
            conversation += 1
            session.put(tokens, payloads=data)
            with session.get(tokens) as lease:
                lease.copy_into(data[: len(lease)])
            going.set()
