"""The Transformers cache on device memory: blocks are stored from it and restored into it beside the model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from tests.gpu.emulated import emulated_node
from tests.gpu.test_device_leases import DeviceClient, device_client
from tests.reference.running_daemon import running_daemon

torch = pytest.importorskip("torch", reason="needs the extra `transformers`: pip install '.[transformers]'")
pytest.importorskip("transformers", reason="needs the extra `transformers`: pip install '.[transformers]'")
pytestmark = pytest.mark.slow
RIGHT = {"reason": "", "store_reason": "", "right": True, "to the bit": True}
new_prompt = itertools.count().__next__


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceClient]:
    if os.environ.get("KVSTORED_TEST_GPU") == "hardware" and torch.version.cuda is None:
        pytest.skip("needs torch for CUDA")
    complaints = tmp_path_factory.mktemp("driver") / "stderr"
    with pytest.MonkeyPatch.context() as patch, complaints.open("w") as stderr:
        for name, value in emulated_node(256 << 20).items():
            patch.setenv(name, value)
        with running_daemon() as daemon:
            patch.setenv("EMULATED_CUDA_DELAY_US", "15000")  # of the client: waits that are missing are seen
            with device_client(daemon, module="tests.gpu.device_transformers", stderr=stderr) as client:
                yield client
    assert "emulated CUDA" not in complaints.read_text(), complaints.read_text()


def test_a_prompt_is_stored_from_the_device_and_restored_beside_the_model(client: DeviceClient) -> None:
    number, other = new_prompt(), new_prompt()
    assert client("answer", number, 100) == RIGHT | {"restored": 0, "stored": 12, "reason": "never_stored"}
    assert client("answer", number, 100) == RIGHT | {"restored": 96, "stored": 0}
    assert client("answer", other, 96) == RIGHT | {"restored": 0, "stored": 12, "reason": "never_stored"}
    assert client("answer", other, 96) == RIGHT | {"restored": 95, "stored": 0}, "a token of the last block is computed"
    assert client("restore", other, 96) == RIGHT | {"restored": 95, "stored": 0}


def test_calls_that_begin_inside_of_a_block_are_restored(client: DeviceClient) -> None:
    number = new_prompt()
    client("answer", number, 200)
    found = client("chunks", number, 200, 51)
    assert (found["restored"], found["right"]) == (48 + 45 + 50 + 46, True)


def test_an_answer_is_stored_while_its_tensor_grows(client: DeviceClient) -> None:
    number = new_prompt()
    found = client("chunks", number, 150, 1)
    assert (found["stored"], found["store_reason"], found["right"]) == (18, "", True)
    assert client("answer", number, 150) == RIGHT | {"restored": 144, "stored": 0}


def test_a_call_whose_lease_ended_is_computed_again(client: DeviceClient) -> None:
    number = new_prompt()
    client("answer", number, 100)
    found = client("answer while the lease ends", number, 100)
    assert (found["restored"], found["right"]) == (0, True)
    assert "the lease ended" in found["reason"]


@pytest.mark.parametrize("held", [0, 8, 51, 197])
def test_growing_waits_for_what_is_coming_and_what_is_held_stays(client: DeviceClient, held: int) -> None:
    number = new_prompt()
    client("answer", number, 200)
    assert client("grow", number, 200, held) == {"restored": 200, "grown": True, "valid": True, "right": True}


def test_a_load_that_nobody_finishes_ends_by_itself(client: DeviceClient) -> None:
    number = new_prompt()
    client("answer", number, 200)
    for _ in range(3):
        assert client("drop", number, 200) == {"restored": 200}
    assert client("answer", number, 200) == RIGHT | {"restored": 199, "stored": 0}


def test_what_the_stream_still_writes_is_not_overtaken(client: DeviceClient) -> None:
    number = new_prompt()
    client("answer", number, 96)
    for _ in range(3):  # by the buffer first, then from registered memory
        assert client("behind", number, 96) == {"valid": True, "right": True}
    assert client("store", new_prompt(), 96) == {"stored": 12, "found": 12, "right": True}
    assert client("store", new_prompt(), 96) == {"stored": 12, "found": 12, "right": True}
