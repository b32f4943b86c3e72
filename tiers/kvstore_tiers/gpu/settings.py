"""How a tier of device memory and its worker behave; what an operator does not set is for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore_tiers.gpu.wire import SOCKET_BYTES

AUTO, DIRECT, BOUNCE, OFF = "auto", "direct", "bounce", "off"  # ways for blocks from files, or none


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`checks`: whether the worker is to checksum device memory, where it can. `from_files`: how it reads files; AUTO:
    by direct storage where that is there. `registers`: whether it copies memory of other tiers in place;
    `register_bytes`: how much of that is registered in a call. `variables`: of its environment, beside ours.

    `patience_s`: a worker that does not end a transfer in so many seconds is killed; `file_patience_s`: of a load from
    a file; `start_timeout_s`: one that is not ready by then is, too. `regrow_s`: for how long no memory is asked for
    after the device had none. `socket_bytes`: of the buffer of its socket, as far as the system grants that.
    """

    checks: bool = True
    from_files: str = BOUNCE
    registers: bool = True
    register_bytes: int = 256 << 20  # some 25 ms by others' figures, which a withdrawal may have to wait for
    variables: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 30.0  # a transfer takes milliseconds
    file_patience_s: float = 120.0  # a disk that hangs is not its fault: its own breaker and the kernel act before that
    start_timeout_s: float = 60.0
    regrow_s: float = 10.0
    socket_bytes: int = SOCKET_BYTES

    @property
    def wants_direct(self) -> bool:
        return self.from_files in (AUTO, DIRECT)
