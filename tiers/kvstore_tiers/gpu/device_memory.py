"""Chunks of device memory as a worker has them: made, mapped, given back.

Owns the handles and mappings, and what is known of chunks that are not there. Never decides which are wanted.
Invariants: a chunk that was made is there once it is cleared and the tier has a descriptor of it; nothing is unmapped
while a copy is under way; memory with blocks that could not be mapped is tried again whenever it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu import wire
from kvstore_tiers.gpu.driver import Driver
from kvstore_tiers.gpu.events import Events


@dataclass(frozen=True, slots=True)
class _Chunk:
    handle: Any
    address: int
    nbytes: int


class DeviceMemory:
    """`say` sends a packet and descriptors. Raises DriverError where the context is broken."""

    def __init__(self, driver: Driver, events: Events, say: Callable[..., None]) -> None:
        self._driver = driver
        self._events = events
        self._say = say
        self._chunks: dict[int, _Chunk] = {}
        self._missing: dict[int, str] = {}  # chunks that are not there, and why
        self._unmapped: dict[int, tuple[int, int]] = {}  # those of them that hold blocks: bytes, a descriptor

    def add(self, number: int, nbytes: int, descriptor: int = -1) -> None:
        """Memory of which there is a descriptor, which stays the caller's; else new memory. One that is known already
        is left as it is; the tier is notified of one that cannot be had."""
        if number in self._chunks:
            return
        try:
            if descriptor < 0:
                self._make(number, nbytes)
            else:
                if number not in self._unmapped:
                    self._unmapped[number] = nbytes, os.dup(descriptor)
                self._import(number)
        except DriverError as error:
            if error.is_final:
                raise
            self._missing[number] = str(error)
            self._say(wire.pack(wire.REFUSED, number, text=str(error)))

    def drop(self, number: int) -> None:
        self._forget_missing(number)
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self._events.settle()
            self._unmap(chunk)

    def address_of(self, number: int, offset: int, nbytes: int) -> int:
        """Raises KeyError for what is not there."""
        if number in self._unmapped:
            try:
                self._import(number)
            except DriverError as error:
                if error.is_final:
                    raise
        chunk = self._chunks[number]
        if offset + nbytes > chunk.nbytes:
            raise KeyError("outside its memory")
        return chunk.address + offset

    def why_missing(self, numbers: Iterable[int]) -> str:
        """Of the first of these chunks that is known to be missing; empty where none is."""
        return next((self._missing[number] for number in numbers if number in self._missing), "")

    def _make(self, number: int, nbytes: int) -> None:
        chunk = self._mapped(self._driver.create(nbytes), nbytes)
        try:
            self._driver.clear(chunk.address, nbytes)  # a client may import it: whose was it before?
            exported = self._driver.export_descriptor(chunk.handle)
        except DriverError:
            self._unmap(chunk)
            raise
        try:
            self._say(wire.pack(wire.MADE, number), exported)
        finally:
            os.close(exported)
        self._chunks[number] = chunk

    def _mapped(self, handle: Any, nbytes: int) -> _Chunk:
        try:
            return _Chunk(handle, self._driver.map(handle, nbytes), nbytes)
        except DriverError:
            self._driver.release(handle)
            raise

    def _import(self, number: int) -> None:
        nbytes, descriptor = self._unmapped[number]
        self._chunks[number] = self._mapped(self._driver.import_descriptor(descriptor), nbytes)
        self._forget_missing(number)

    def _forget_missing(self, number: int) -> None:
        self._missing.pop(number, None)
        if number in self._unmapped:
            os.close(self._unmapped.pop(number)[1])

    def _unmap(self, chunk: _Chunk) -> None:
        self._driver.unmap(chunk.address, chunk.nbytes)
        self._driver.release(chunk.handle)
