"""A send without a peer becomes one debug line; other gRPC log records stay unchanged."""

from __future__ import annotations

import logging

import pytest
from google.protobuf.message import DecodeError
from grpc._cython.cygrpc import ExecuteBatchError

from kvstored.rpc.grpc_socket import expect_departures

GRPC = logging.getLogger("grpc._cython.cygrpc")


def _logged(error: Exception) -> None:
    try:
        raise error
    except Exception:
        GRPC.exception("raised by servicer method [/kvstore.v1.KVStore/Session]")


def test_a_client_that_left_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    expect_departures()
    expect_departures()
    with caplog.at_level(logging.DEBUG):
        _logged(ExecuteBatchError('Failed "execute_batch"'))
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.DEBUG, None)]
    assert "left before an answer reached it" in caplog.text


def test_a_message_that_cannot_be_read_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    expect_departures()
    with caplog.at_level(logging.DEBUG):
        _logged(DecodeError("Wire format was corrupt"))
    assert [(record.levelno, record.exc_info) for record in caplog.records] == [(logging.DEBUG, None)]


def test_an_error_of_a_servicer_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    expect_departures()
    _logged(RuntimeError("a defect"))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "a defect" in caplog.text and "Traceback" in caplog.text
