"""The answers of unary calls hold after kill -9: durable is there, deleted is gone. And callers that hang up."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from kvstore_proto.v1 import kvstore_pb2 as kv
from kvstore_proto.v1 import unary_pb2 as pb
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import eventually, running_daemon
from tests.reference.unary_client import by_tokens, names, unary_client

MODEL = model()


def test_durable_survives_and_deleted_stays_away() -> None:
    kept, dropped = by_tokens(MODEL, tokens_of(1, 3)), by_tokens(MODEL, tokens_of(2, 3))
    payloads = payloads_of(1, 3, MODEL)
    with running_daemon() as daemon:
        target = f"unix:{daemon.socket_dir}/unary.sock"
        with unary_client(target) as client:
            for chain, number in ((kept, 1), (dropped, 2)):
                stored = client.put(chain, payloads_of(number, 3, MODEL), durability=kv.DURABILITY_MODE_ALWAYS)
                assert list(stored.durability) == [kv.DURABILITY_DURABLE] * 3
            assert names(client.delete(dropped).statuses) == ["DELETED"] * 3
        daemon.kill9()
        daemon.restart()
        with unary_client(target) as client:
            assert list(client.get(kept).payloads) == [payload.tobytes() for payload in payloads]
            assert names(client.lookup(dropped).statuses) == ["MISS"] * 3


def test_without_durability_nothing_is_promised() -> None:
    with running_daemon() as daemon, unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client:
        asked = by_tokens(MODEL, tokens_of(1, 2))
        stored = client.put(asked, payloads_of(1, 2, MODEL), durability=kv.DURABILITY_MODE_NONE)
        assert list(stored.durability) == [kv.DURABILITY_VOLATILE] * 2


def test_an_early_answer_does_not_say_durable_too_soon() -> None:
    settings = ("durability.batch_ms=60000",)
    with running_daemon(*settings) as daemon, unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client:
        chain = by_tokens(MODEL, tokens_of(1, 2))
        stored = client.put(chain, payloads_of(1, 2, MODEL), answer_early=True)
        assert names(stored.statuses) == ["STORED"] * 2
        assert list(stored.durability) == [kv.DURABILITY_PENDING] * 2
        assert client.lookup(chain).usable_blocks == 2
        again = client.put(chain, payloads_of(1, 2, MODEL), answer_early=True)
        assert names(again.statuses) == ["PRESENT"] * 2
        assert list(again.durability) == [kv.DURABILITY_PENDING] * 2


def test_what_was_stored_without_durability_is_made_durable_by_a_put_that_asks_for_it() -> None:
    with running_daemon() as daemon:
        target = f"unix:{daemon.socket_dir}/unary.sock"
        chain, payloads = by_tokens(MODEL, tokens_of(1, 3)), payloads_of(1, 3, MODEL)
        with unary_client(target) as client:
            stored = client.put(chain, payloads, durability=kv.DURABILITY_MODE_NONE)
            assert list(stored.durability) == [kv.DURABILITY_VOLATILE] * 3
            again = client.put(chain, payloads, durability=kv.DURABILITY_MODE_ALWAYS, answer_early=True)
            assert names(again.statuses) == ["PRESENT"] * 3
            assert list(again.durability) == [kv.DURABILITY_DURABLE] * 3
        daemon.kill9()
        daemon.restart()
        with unary_client(target) as client:
            assert list(client.get(chain).payloads) == [payload.tobytes() for payload in payloads]


@pytest.mark.parametrize("method", ["Put", "Get"])
def test_a_caller_that_hangs_up_leaves_nothing(method: str) -> None:
    with running_daemon() as daemon, unary_client(f"unix:{daemon.socket_dir}/unary.sock") as client:
        stored = by_tokens(MODEL, tokens_of(1, 8))
        client.put(stored, payloads_of(1, 8, MODEL))
        for round_ in range(20):
            daemon.drop("host")
            if method == "Get":
                begin, request = client.stub.Get.future, pb.UnaryGetRequest(chain=stored)
            else:
                payloads = [payload.tobytes() for payload in payloads_of(2 + round_, 8, MODEL)]
                chain = by_tokens(MODEL, tokens_of(2 + round_, 8))
                begin, request = client.stub.Put.future, pb.UnaryPutRequest(chain=chain, payloads=payloads)
            if round_ % 2:
                with daemon.frozen(), pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
                    call = begin(request)
                    call.cancel()
                    call.result()
            else:  # at any point of the call, or after its end
                call = begin(request)
                call.cancel()
                with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
                    call.result()
        assert eventually(lambda: daemon.status().leases == 0)
        assert list(client.get(stored).payloads) == [payload.tobytes() for payload in payloads_of(1, 8, MODEL)]
        for conversation in range(2, 22):
            chain = by_tokens(MODEL, tokens_of(conversation, 8))
            for status in names(client.put(chain, payloads_of(conversation, 8, MODEL)).statuses):
                assert status in ("STORED", "PRESENT"), "its keys are free"
        assert "Traceback" not in daemon.log
