"""The emulated CUDA driver is as strict as it says, called by ctypes as a program would call the real one."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.emulated_cuda.build import driver_directory

CHUNK = 2 << 20
INVALID, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_HANDLE, NOT_READY, ILLEGAL = 1, 2, 101, 400, 600, 700
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
READ, READ_WRITE = 1, 3
_NODES = itertools.count()


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location), ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )  # fmt: skip


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """The calls of one loaded copy of the library; `call` answers the code."""

    def __init__(self, path: Path, device: int = 0) -> None:
        self.library = ctypes.CDLL(str(path))
        self.device = device
        self.must("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.must("cuCtxSetCurrent", self.context)
        self.stream = ctypes.c_void_p()
        self.must("cuStreamCreate", ctypes.byref(self.stream), 1)

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self.library, name)(*arguments))

    def must(self, name: str, *arguments: object) -> None:
        assert self.call(name, *arguments) == 0, name

    def create(self, nbytes: int = CHUNK) -> tuple[int, ctypes.c_uint64]:
        handle = ctypes.c_uint64()
        wanted = Properties(1, 1, Location(1, self.device))
        code = self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(wanted), u64(0))
        return code, handle

    def map(self, handle: ctypes.c_uint64, rights: int = READ_WRITE) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.must(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(CHUNK), ctypes.c_size_t(0), u64(0), u64(0)
        )
        self.must("cuMemMap", address, ctypes.c_size_t(CHUNK), ctypes.c_size_t(0), handle, u64(0))
        if rights:
            assert self.give_access(address, self.device, rights) == 0
        return address

    def give_access(self, address: ctypes.c_uint64, device: int, rights: int) -> int:
        access = Access(Location(1, device), rights)
        return self.call("cuMemSetAccess", address, ctypes.c_size_t(CHUNK), ctypes.byref(access), ctypes.c_size_t(1))

    def to_device(self, to: ctypes.c_uint64, memory: Memory, nbytes: int = 4096) -> int:
        return self.call("cuMemcpyHtoDAsync_v2", to, memory.pointer, ctypes.c_size_t(nbytes), self.stream)

    def to_host(self, memory: Memory, source: ctypes.c_uint64, nbytes: int = 4096) -> int:
        return self.call("cuMemcpyDtoHAsync_v2", memory.pointer, source, ctypes.c_size_t(nbytes), self.stream)

    def within(self, to: int, source: int, nbytes: int = 4096) -> int:
        """Addresses of device memory."""
        return self.call("cuMemcpyDtoDAsync_v2", u64(to), u64(source), ctypes.c_size_t(nbytes), self.stream)

    def wait(self) -> int:
        return self.call("cuStreamSynchronize", self.stream)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value


class Memory:
    """A page of host memory."""

    def __init__(self, content: bytes = b"\0") -> None:
        self.mapping = mmap.mmap(-1, 4096)
        self.mapping[:] = (content * 4096)[:4096]
        self.pointer = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.mapping)))

    def register(self, driver: Driver, flags: int = 0) -> Memory:
        driver.must("cuMemHostRegister_v2", self.pointer, ctypes.c_size_t(4096), flags)
        return self


def u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of its own: a broken context breaks no other test."""
    monkeypatch.setenv("EMULATED_CUDA_NODE", f"test{os.getpid()}-{next(_NODES)}")
    return Path(shutil.copy(driver_directory() / "libcuda.so.1", tmp_path / "libcuda.so.1"))


def test_bytes_go_to_the_device_and_back_when_the_stream_has_run(path: Path) -> None:
    driver = Driver(path)
    code, handle = driver.create()
    assert code == 0
    device, source, target = driver.map(handle), Memory(b"ab").register(driver), Memory().register(driver)
    assert driver.to_device(device, source) == 0 and driver.to_host(target, device) == 0
    assert driver.wait() == 0
    assert target.mapping[:] == b"ab" * 2048


def test_a_destination_is_poisoned_until_its_event_has_passed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "run:1=hang")
    driver = Driver(path)
    device, target, event = driver.map(driver.create()[1]), Memory(b"z").register(driver), ctypes.c_void_p()
    driver.must("cuEventCreate", ctypes.byref(event), 2)
    assert driver.to_host(target, device) == 0
    driver.must("cuEventRecord", event, driver.stream)
    assert driver.call("cuEventQuery", event) == NOT_READY
    assert target.mapping[:] == b"\xa5" * 4096


def test_device_memory_is_poisoned_until_what_goes_there_has_come(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the right bytes were there before: who does not wait for another stream's copy sees it."""
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "run1:2=hang")
    driver = Driver(path)
    device, source, target = driver.map(driver.create()[1]), Memory(b"s").register(driver), Memory().register(driver)
    assert driver.to_device(device, source) == 0 and driver.wait() == 0
    assert driver.to_device(device, source) == 0
    driver.must("cuStreamCreate", ctypes.byref(driver.stream), 1)
    assert driver.to_host(target, device) == 0 and driver.wait() == 0
    assert target.mapping[:] == b"\xa5" * 4096


def test_a_copy_on_the_device_is_poisoned_until_it_has_come(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "run1:2=hang")
    driver = Driver(path)
    device, source, target = driver.map(driver.create()[1]), Memory(b"s").register(driver), Memory().register(driver)
    assert driver.to_device(device, source) == 0 and driver.wait() == 0
    assert driver.within(device.value + 8192, device.value) == 0
    driver.must("cuStreamCreate", ctypes.byref(driver.stream), 1)
    for offset, found in ((8192, b"\xa5"), (0, b"s")):
        assert driver.to_host(target, u64(device.value + offset)) == 0 and driver.wait() == 0
        assert target.mapping[:] == found * 4096


def test_a_copy_on_the_device_may_not_overlap(path: Path) -> None:
    driver = Driver(path)
    device, target = driver.map(driver.create()[1]), Memory().register(driver)
    assert driver.to_device(device, Memory(b"s").register(driver)) == 0 and driver.wait() == 0
    assert driver.within(device.value + 4095, device.value) == INVALID
    assert driver.within(device.value, device.value) == INVALID
    assert driver.within(device.value + 4096, device.value) == 0
    assert driver.to_host(target, u64(device.value + 4096)) == 0 and driver.wait() == 0
    assert target.mapping[:] == b"s" * 4096


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_copy_on_the_device_without_the_right_breaks_the_context(path: Path, side: str) -> None:
    driver = Driver(path)
    unmapped, mapped = driver.map(driver.create()[1], rights=0), driver.map(driver.create()[1])
    to, source = (mapped, unmapped) if side == "source" else (unmapped, mapped)
    assert driver.within(to.value, source.value) == 0
    assert driver.wait() == ILLEGAL


def test_what_queued_copies_still_read_is_not_poisoned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_DELAY_US", "20000")
    driver = Driver(path)
    device, target = driver.map(driver.create()[1]), Memory().register(driver)
    old, new = Memory(b"o").register(driver), Memory(b"n").register(driver)
    assert driver.to_device(device, old) == 0 and driver.wait() == 0
    assert driver.to_host(target, device) == 0 and driver.to_device(device, new) == 0 and driver.wait() == 0
    assert target.mapping[:] == b"o" * 4096


def test_a_capture_poisons_nothing(path: Path) -> None:
    driver, graph = Driver(path), ctypes.c_void_p()
    device, source, target = driver.map(driver.create()[1]), Memory(b"s"), Memory(b"t").register(driver)
    source.register(driver)
    assert driver.to_device(device, source) == 0 and driver.wait() == 0
    driver.must("cuStreamBeginCapture_v2", driver.stream, 1)
    assert driver.to_device(device, source) == 0 and driver.to_host(target, device) == 0
    driver.must("cuStreamEndCapture", driver.stream, ctypes.byref(graph))
    assert target.mapping[:] == b"t" * 4096
    assert driver.to_host(target, device) == 0 and driver.wait() == 0 and target.mapping[:] == b"s" * 4096


def test_each_device_has_memory_of_its_own(path: Path) -> None:
    first, second = Driver(path), Driver(path, device=1)  # the context of the second is current from here on
    free_bytes = second.free_bytes()
    handle = second.create()[1]
    device, source, target = second.map(handle), Memory(b"2").register(second), Memory().register(second)
    assert second.to_device(device, source) == 0 and second.to_host(target, device) == 0 and second.wait() == 0
    assert target.mapping[:] == b"2" * 4096 and second.free_bytes() == free_bytes - CHUNK
    first.must("cuCtxSetCurrent", first.context)
    assert first.free_bytes() == free_bytes, "the other one has it"
    assert first.to_host(target, device) == 0 and first.wait() == ILLEGAL, "the other one alone has the right"
    second.must("cuCtxSetCurrent", second.context)
    assert second.to_host(target, device) == 0 and second.wait() == 0, "and its context is as it was"


def test_the_time_between_events_is_known_once_both_have_passed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "run:2=hang")
    driver = Driver(path)
    device, source, events = driver.map(driver.create()[1]), Memory(b"s").register(driver), []
    for flags in (0, 0, 0, 2):
        events.append(ctypes.c_void_p())
        driver.must("cuEventCreate", ctypes.byref(events[-1]), flags)
    took_ms = ctypes.c_float(-1.0)
    assert driver.call("cuEventElapsedTime_v2", ctypes.byref(took_ms), events[0], events[1]) == INVALID_HANDLE
    driver.must("cuEventRecord", events[0], driver.stream)
    assert driver.to_device(device, source) == 0
    driver.must("cuEventRecord", events[1], driver.stream)
    assert driver.wait() == 0
    driver.must("cuEventElapsedTime_v2", ctypes.byref(took_ms), events[0], events[1])
    assert took_ms.value > 0
    assert driver.to_device(device, source) == 0
    for event in events[2:]:
        driver.must("cuEventRecord", event, driver.stream)
    assert driver.call("cuEventElapsedTime_v2", ctypes.byref(took_ms), events[0], events[2]) == NOT_READY
    assert driver.call("cuEventElapsedTime_v2", ctypes.byref(took_ms), events[0], events[3]) == INVALID_HANDLE


def test_streams_overtake_each_other_and_wait_for_events(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "run1:1=hang")
    driver = Driver(path)
    device, source = driver.map(driver.create()[1]), Memory(b"s").register(driver)
    event, stuck = ctypes.c_void_p(), driver.stream
    driver.must("cuEventCreate", ctypes.byref(event), 2)
    assert driver.to_device(device, source) == 0
    driver.must("cuEventRecord", event, stuck)
    driver.stream = ctypes.c_void_p()
    driver.must("cuStreamCreate", ctypes.byref(driver.stream), 1)
    assert driver.to_device(device, source) == 0 and driver.wait() == 0
    driver.must("cuStreamWaitEvent", driver.stream, event, 0)
    assert driver.call("cuStreamQuery", driver.stream) == NOT_READY


def test_what_a_stream_captures_runs_when_its_graph_is_launched_and_each_time(path: Path) -> None:
    driver = Driver(path)
    device, source, target = driver.map(driver.create()[1]), Memory(b"1").register(driver), Memory().register(driver)
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    driver.must("cuStreamBeginCapture_v2", driver.stream, 1)
    assert driver.to_device(device, source) == 0 and driver.to_host(target, device) == 0
    assert driver.wait() == CAPTURE_UNSUPPORTED
    driver.must("cuStreamEndCapture", driver.stream, ctypes.byref(graph))
    assert driver.wait() == 0 and target.mapping[:1] != b"1", "nothing has run yet"
    driver.must("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, u64(0))
    for content in (b"1", b"2"):
        source.mapping[:] = content * 4096
        driver.must("cuGraphLaunch", executable, driver.stream)
        assert driver.wait() == 0 and target.mapping[:] == content * 4096


def test_a_capture_forbids_other_threads_what_it_cannot_see(path: Path) -> None:
    driver, graph, memory = Driver(path), ctypes.c_void_p(), Memory(b"1")
    found = []

    def register(mode: int) -> None:
        driver.must("cuCtxSetCurrent", driver.context)
        driver.must("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(mode)))
        found.append(driver.call("cuMemHostRegister_v2", memory.pointer, ctypes.c_size_t(4096), 0))

    for mode in (2, 0):
        driver.must("cuStreamBeginCapture_v2", driver.stream, 0)
        other = threading.Thread(target=register, args=(mode,))
        other.start()
        other.join()
        found.append(driver.call("cuStreamEndCapture", driver.stream, ctypes.byref(graph)))
    assert found == [0, 0, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED]


def test_a_copy_from_unregistered_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(path)
    device = driver.map(driver.create()[1])
    assert driver.to_device(device, Memory()) == INVALID
    monkeypatch.setenv("EMULATED_CUDA_STRICT", "0")
    assert driver.to_device(device, Memory()) == 0 and driver.wait() == 0


def test_read_only_device_memory_cannot_be_written(path: Path) -> None:
    driver = Driver(path)
    device, memory = driver.map(driver.create()[1], READ), Memory().register(driver)
    assert driver.to_host(memory, device) == 0 and driver.wait() == 0
    assert driver.to_device(device, memory) == 0
    assert driver.wait() == ILLEGAL
    assert driver.create()[0] == ILLEGAL, "the context is broken for good"


def test_a_device_has_no_right_to_the_memory_of_another_one(path: Path, tmp_path: Path) -> None:
    driver, descriptor, imported = Driver(path), ctypes.c_int(), ctypes.c_uint64()
    _, handle = driver.create()
    own = driver.map(handle)
    assert [driver.give_access(own, 1, rights) for rights in (0, READ, READ_WRITE)] == [0, *[INVALID_DEVICE] * 2]
    driver.must("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, 1, u64(0))
    other = Driver(Path(shutil.copy(path, tmp_path / "another.so")), device=1)
    other.must("cuMemImportFromShareableHandle", ctypes.byref(imported), ctypes.c_void_p(descriptor.value), 1)
    os.close(descriptor.value)
    foreign, memory = other.map(imported, 0), Memory().register(other)
    assert other.give_access(foreign, 1, READ) == INVALID_DEVICE
    assert other.give_access(foreign, 0, READ) == 0, "that of the device whose memory it is, and no other's"
    assert other.to_host(memory, foreign) == 0 and other.wait() == ILLEGAL


def test_memory_that_was_unmapped_is_an_illegal_address(path: Path) -> None:
    driver = Driver(path)
    device, memory = driver.map(driver.create()[1]), Memory().register(driver)
    driver.must("cuMemUnmap", device, ctypes.c_size_t(CHUNK))
    assert driver.to_device(device, memory) == 0 and driver.wait() == ILLEGAL


def test_plain_memory_is_copied_counted_and_of_no_use_once_it_is_freed(path: Path) -> None:
    driver, address = Driver(path), ctypes.c_uint64()
    driver.must("cuStreamCreateWithPriority", ctypes.byref(driver.stream), 1, -1000)
    memory, free_bytes = Memory(b"p").register(driver), driver.free_bytes()
    driver.must("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4096))
    assert driver.free_bytes() < free_bytes
    assert driver.to_device(address, memory) == 0 and driver.wait() == 0
    driver.must("cuMemFree_v2", address)
    assert driver.free_bytes() == free_bytes
    assert driver.call("cuMemFree_v2", address) == INVALID
    assert driver.to_device(address, memory) == INVALID or driver.wait() == ILLEGAL


def test_host_memory_registered_read_only_cannot_be_written(path: Path) -> None:
    driver = Driver(path)
    device, memory = driver.map(driver.create()[1]), Memory().register(driver, 8)
    assert driver.to_device(device, memory) == 0 and driver.wait() == 0
    assert driver.to_host(memory, device) == ILLEGAL


def test_memory_that_the_cpu_only_reads_needs_read_only_registration(path: Path) -> None:
    driver = Driver(path)
    descriptor = os.memfd_create("readable")
    os.ftruncate(descriptor, 4096)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0))
    assert driver.call("cuMemHostRegister_v2", address, ctypes.c_size_t(4096), 0) == INVALID
    assert driver.call("cuMemHostRegister_v2", address, ctypes.c_size_t(4096), 8) == 0
    os.close(descriptor)


def test_a_full_device_has_no_memory_and_gets_it_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_MEMORY", str(2 * CHUNK))
    driver = Driver(path)
    (_, first), (_, _) = driver.create(), driver.create()
    assert driver.create()[0] == OUT_OF_MEMORY and driver.free_bytes() == 0
    device = driver.map(first)
    driver.must("cuMemRelease", first)
    assert driver.create()[0] == OUT_OF_MEMORY, "what is mapped is still there"
    driver.must("cuMemUnmap", device, ctypes.c_size_t(CHUNK))
    assert driver.free_bytes() == CHUNK and driver.create()[0] == 0


def test_a_descriptor_keeps_the_memory_and_its_bytes(path: Path, tmp_path: Path) -> None:
    driver = Driver(path)
    _, handle = driver.create()
    device, memory, descriptor = driver.map(handle), Memory(b"kept").register(driver), ctypes.c_int()
    assert driver.to_device(device, memory) == 0 and driver.wait() == 0
    driver.must("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, 1, u64(0))
    driver.must("cuMemUnmap", device, ctypes.c_size_t(CHUNK))
    driver.must("cuMemRelease", handle)
    other = Driver(Path(shutil.copy(path, tmp_path / "another.so")))
    again = ctypes.c_uint64()
    before = other.free_bytes()
    other.must("cuMemImportFromShareableHandle", ctypes.byref(again), ctypes.c_void_p(descriptor.value), 1)
    os.close(descriptor.value)
    target = Memory().register(other)
    assert other.free_bytes() == before
    assert other.to_host(target, other.map(again, READ)) == 0 and other.wait() == 0
    assert target.mapping[:] == b"kept" * 1024


def test_calls_fail_when_it_is_ordered(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / "control"
    control.write_text("cuMemCreate:2=2")
    monkeypatch.setenv("EMULATED_CUDA_CONTROL", str(control))
    driver = Driver(path)
    assert [driver.create()[0] for _ in range(3)] == [0, OUT_OF_MEMORY, 0]
    control.unlink()
    control.write_text("cuMemCreate:0=801 cuStreamQuery:1=700")
    assert [driver.create()[0] for _ in range(2)] == [801, 801]
    assert driver.call("cuStreamQuery", driver.stream) == ILLEGAL


def test_an_illegal_address_that_is_ordered_breaks_the_context(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "cuStreamQuery:1=700 cuEventCreate:1=801")
    driver, event = Driver(path), ctypes.c_void_p()
    assert driver.call("cuEventCreate", ctypes.byref(event), 2) == 801 and driver.wait() == 0, "any other one does not"
    assert [driver.call("cuStreamQuery", driver.stream) for _ in range(2)] == [ILLEGAL, ILLEGAL]
    assert driver.wait() == ILLEGAL


def test_calls_that_need_no_context_fail_when_it_is_ordered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, text, number = ctypes.CDLL(str(path)), ctypes.c_char_p(), ctypes.c_int()
    calls = {
        "cuDriverGetVersion": lambda: library.cuDriverGetVersion(ctypes.byref(number)),
        "cuGetErrorName": lambda: library.cuGetErrorName(1, ctypes.byref(text)),
        "cuGetErrorString": lambda: library.cuGetErrorString(1, ctypes.byref(text)),
        "cuGetProcAddress": lambda: library.cuGetProcAddress_v2(b"cuInit", ctypes.byref(text), 13000, u64(0), None),
    }
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", " ".join(f"{name}:2=999" for name in calls))
    assert {name: [call(), call(), call()] for name, call in calls.items()} == {name: [0, 999, 0] for name in calls}


def test_calls_are_traced_and_so_is_what_was_ordered(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_CUDA_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("EMULATED_CUDA_FAULTS", "cuMemCreate:1=2")
    assert Driver(path).create()[0] == OUT_OF_MEMORY
    assert (tmp_path / "trace").read_text().split() == [
        "cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate", "cuMemCreate=2",
    ]  # fmt: skip


def test_a_call_kills_the_process_when_it_is_ordered(path: Path) -> None:
    program = f"import ctypes; ctypes.CDLL({str(path)!r}).cuInit(0)"
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | {"EMULATED_CUDA_FAULTS": "cuInit:1=kill"})
    assert ended.returncode == -signal.SIGKILL


def test_the_cpu_faults_on_device_memory(path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import ctypes, pathlib
from tests.gpu.test_emulated_driver import Driver
driver = Driver(pathlib.Path({str(path)!r}))
ctypes.string_at(driver.map(driver.create()[1]).value, 1)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGSEGV
