"""The Transformers cache on device memory: blocks are stored from it and restored into it beside the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.emulated import emulated_node
from tests.gpu.test_device_leases import DeviceClient, device_client
from tests.reference.running_daemon import running_daemon

pytest.importorskip("transformers", reason="needs the extra `transformers`: pip install 'kvstored[transformers]'")
pytestmark = pytest.mark.slow
BLOCK = 8  # tokens
RIGHT = {"reason": "", "store_reason": "", "right": True, "to the bit": True}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[DeviceClient]:
    for name, value in emulated_node(256 << 20, must_emulate=True).items():
        monkeypatch.setenv(name, value)
    with running_daemon() as daemon:
        monkeypatch.setenv("EMULATED_CUDA_DELAY_US", "5000")  # of the client: waits that are missing are seen
        with device_client(daemon, module="tests.gpu.device_transformers") as client:
            yield client
    said = capfd.readouterr().err
    print(said)
    assert "emulated CUDA" not in said, "the driver had something to complain of"


def test_a_prompt_is_stored_from_the_device_and_restored_beside_the_model(client: DeviceClient) -> None:
    cold = client("answer", 1, 100)
    assert cold == RIGHT | {"restored": 0, "stored": 12, "reason": "never_stored"}
    assert client("answer", 1, 100) == RIGHT | {"restored": 96, "stored": 0}
    assert client("answer", 2, 96) | {"reason": ""} == RIGHT | {"restored": 0, "stored": 12}
    assert client("answer", 2, 96) == RIGHT | {"restored": 95, "stored": 0}, "of the last block a token is computed"
    assert client("restore", 2, 96) == RIGHT | {"restored": 95, "stored": 0}


def test_calls_that_begin_inside_of_a_block_are_restored(client: DeviceClient) -> None:
    client("answer", 1, 200)
    found = client("chunks", 1, 200, 51)
    assert (found["restored"], found["right"]) == (48 + 45 + 50 + 46, True)


def test_a_call_whose_lease_ended_is_computed_again(client: DeviceClient) -> None:
    client("answer", 1, 100)
    found = client("answer while the lease ends", 1, 100)
    assert (found["restored"], found["right"]) == (0, True)
    assert "the lease ended" in found["reason"]


@pytest.mark.parametrize("held", [0, 8, 51, 197])
def test_growing_waits_for_what_is_coming_and_what_is_held_stays(client: DeviceClient, held: int) -> None:
    client("answer", 1, 200)
    assert client("grow", 1, 200, held) == {"restored": 200, "grown": True, "valid": True, "right": True}


def test_a_load_that_nobody_finishes_ends_by_itself(client: DeviceClient) -> None:
    client("answer", 1, 200)
    for _ in range(3):
        assert client("drop", 1, 200) == {"restored": 200}
    assert client("answer", 1, 200) == RIGHT | {"restored": 199, "stored": 0}


def test_what_the_stream_still_writes_is_not_overtaken(client: DeviceClient) -> None:
    client("answer", 1, 96)
    for _ in range(3):  # by the buffer first, then from registered memory
        assert client("behind", 1, 96) == {"valid": True, "right": True}
    assert client("store", 2, 96) == {"stored": 12, "found": 12, "right": True}
    assert client("store", 3, 96) == {"stored": 12, "found": 12, "right": True}
