"""A client that reads leases on device memory, in a process that finds the emulated driver.

    python -m tests.gpu.device_client SOCKET_DIR UID DEVICE      then a line of JSON in for each line out

Commands: ["get", conversation, blocks], ["hold", conversation, blocks] (the lease stays), ["again"] (what is held),
["write"] (tries to write where a held block is), ["release"], ["lookup", conversation, blocks], ["arena", number],
["used"] (bytes of the device, by all processes), ["load", conversation, blocks] (into pages of a pool on the device),
["register"] (wait until host memory that was used is registered), ["store", conversation, blocks] (from the pool),
["store-at-once", conversation, blocks] (one event behind all layers), ["store-decoding", conversation, blocks] (while
the engine decodes), ["store-beside-a-load", conversation, blocks, another] (which is loaded while the store waits for
its rate), ["crossover"] (what the kernel copies, by way),
["arrays"] (of what is held, read by the driver where they say that they are), ["keep"] (one of them, as a capsule),
["let-go"] (of it),
["close"] (the transfers; the next load has new ones),
["load-captured", conversation, blocks] (while a stream is captured),
["registered"] (pieces of host memory that are), ["forge"] (write over the first held block, which CUDA cannot forbid),
["vllm", layout] (a worker of vLLM with a pool on the device), ["vllm.NAME", numbers] (a method of it).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

import numpy as np

from kvstore_client import KVStoreError, Lease, Session, connect
from kvstore_client.device import DeviceError, DeviceMemory
from tests.gpu.device_engine import EmulatedEngine
from tests.gpu.vllm_engine import VllmWorker
from tests.reference.conversations import LAYERS, model, payloads_of, tokens_of

MODEL = model(kib_a_block=int(os.environ.get("TEST_KIB_A_BLOCK", "16")))


def answer(client: Client, *command: Any) -> dict[str, Any]:
    """ "failed" says what the driver or the library did; then nothing else is known."""
    try:
        return client.obey(*command)
    except (DeviceError, KVStoreError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def describe(lease: Lease, number: int) -> dict[str, Any]:
    expected = payloads_of(number, lease.blocks, MODEL)
    return {
        "blocks": lease.blocks,
        "on_device": sum(bool(lease.device_address(block)) for block in range(lease.blocks)),
        "right": all(bool((lease.payload(at) == payload).all()) for at, payload in enumerate(expected)),
        "verified": lease.verify(tokens_of(number, lease.blocks)) if lease.blocks else True,
        "valid": lease.valid,
        "promoted_bytes": lease.promoted_bytes,
    }


class Client:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.held: tuple[Lease, int] | None = None
        self.engine: EmulatedEngine | None = None
        self.still_registered: list[object] = []  # memory of engines that were closed
        self.worker: VllmWorker | None = None
        self.kept: Any = None

    def obey(self, command: str, *numbers: Any) -> dict[str, Any]:
        if command in ("get", "hold"):
            number, blocks = numbers
            lease = self.session.get(tokens_of(number, blocks))
            answer = describe(lease, number)
            if command == "hold":
                self.held = lease, number
            else:
                lease.release()
            return answer
        if command == "vllm":
            self.worker = VllmWorker(self.session, *numbers)
            return {}
        if command.startswith("vllm."):
            assert self.worker is not None
            return self.worker.obey(command.removeprefix("vllm."), *numbers)
        if command.startswith(("load", "store", "register", "crossover")):
            if self.engine is None:
                self.engine = EmulatedEngine(self.session)
            return self.engine.obey(command, *numbers)
        if command == "close":
            if self.engine is not None:
                engine, self.engine = self.engine, None
                self.still_registered.append(engine.host)
                engine.transfers.close()
            return {}
        if command == "lookup":
            number, blocks = numbers
            return {"tiers": list(self.session.lookup(tokens_of(number, blocks)).tiers)}
        if command == "arena":
            daemon = self.session._connection.current()
            assert daemon is not None
            return {"granted": daemon._handshake.request_arena(numbers[0], 30.0) is not None}
        if command == "used":
            memory = self.session.device
            with memory.current():
                free_bytes, total_bytes = memory.call("cuMemGetInfo")
            return {"bytes": total_bytes - free_bytes, "mapped_bytes": mapped_bytes(self.session)}
        if command == "let-go":
            self.kept = None
            return {"blocks": self.session.lookup(tokens_of(1, 1)).blocks}  # the next request gives it back
        assert self.held is not None
        if command == "arrays":
            return arrays_of(self.session, *self.held)
        if command == "keep":
            self.kept = self.held[0].array(0, kind="k").__dlpack__(stream=1, max_version=(1, 0))
            return {}
        if command == "again":
            return describe(*self.held)
        if command == "forge":
            forge(self.session, self.held[0])
            return {}
        if command == "write":
            return {"failed": write(self.session.device, self.held[0])}
        self.held[0].release()
        self.held = None
        return {}


def mapped_bytes(session: Session) -> int:
    """Return the bytes of the chunks that this process has mapped."""
    daemon = session._connection.current()
    assert daemon is not None
    return sum(chunk.nbytes for chunk in daemon.device_arenas._mapped.values())


def arrays_of(session: Session, lease: Lease, number: int) -> dict[str, Any]:
    arrays = [
        lease.array(block, layer, kind=kind)  # type: ignore[arg-type]
        for block, layer, kind in itertools.product(range(lease.blocks), range(LAYERS), "kv")
    ]
    described = [array.__cuda_array_interface__ for array in arrays]
    nbytes = MODEL.payload_bytes() // LAYERS // 2
    read = session.device.read([(each["data"][0], nbytes) for each in described])
    return {
        "devices": sorted({array.__dlpack_device__() for array in arrays}),
        "right": np.concatenate(read).tobytes() == np.concatenate(payloads_of(number, lease.blocks, MODEL)).tobytes(),
        "described": [described[0][name] for name in ("typestr", "shape", "strides", "stream")],
        "read_only": [arrays[0].readonly, described[0]["data"][1]],
    }


def write(memory: DeviceMemory, lease: Lease) -> str:
    """Return what the driver says to a copy into the first block."""
    try:
        with memory.current():
            to = memory.driver.CUdeviceptr(lease.device_address(0))
            memory.call("cuMemcpyHtoDAsync", to, memory._address, 4096, memory._stream)
            memory.call("cuStreamSynchronize", memory._stream)
    except DeviceError as error:
        return str(error)
    return ""


def forge(session: Session, lease: Lease) -> None:
    """Write by a mapping with the right to write, of a chunk that was granted before."""
    memory, block, cuda = session.device, lease.leased(0), session.device.driver
    assert block.chunk is not None
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = memory.index
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with memory.current():
        memory.call("cuMemSetAccess", cuda.CUdeviceptr(block.chunk.address), block.chunk.nbytes, [access], 1)
        to = cuda.CUdeviceptr(block.chunk.address + block.offset + 4096 + 77)
        memory.call("cuMemcpyHtoDAsync", to, memory._address, 64, memory._stream)
        memory.call("cuStreamSynchronize", memory._stream)


def main(socket_dir: str, uid: str, device: str) -> None:
    DeviceMemory(int(device))  # loads the driver, which that user may not be able to read
    os.seteuid(int(uid))  # of the tenant: the kernel reports it at the time of connecting
    options: dict[str, Any] = {"required": True, "deadline_s": 30.0, "connect_timeout_s": 60.0}
    session = connect(socket_dir, fingerprint=MODEL, device=int(device), **options)
    os.seteuid(os.getuid())
    with session:
        client = Client(session)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(client, *json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
