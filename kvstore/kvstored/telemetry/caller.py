"""Whom a request is counted for, as far as the counts need to know."""

from __future__ import annotations

from typing import Protocol


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def uid(self) -> int: ...


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Caller(Protocol):
    """A session, to those who count."""

    @property
    def session_id(self) -> int: ...

    @property
    def client_name(self) -> str: ...

    @property
    def peer(self) -> Process: ...

    @property
    def tenant(self) -> Named: ...

    @property
    def tenant_id(self) -> int:
        """The tenant's number in residency."""
        ...

    @property
    def fingerprint_digest(self) -> bytes: ...

    @property
    def account(self) -> str:
        """For whom the engine asks; empty where it does not say."""
        ...
