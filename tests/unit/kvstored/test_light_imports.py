"""The daemon loads what it left out at its start, whole, once something asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

LIGHTLY = "from kvstored.process import import_lightly; import_lightly()\n"


def printed(program: str, **variables: str) -> list[str]:
    command, environment = [sys.executable, "-c", LIGHTLY + program], {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_hashes_are_right_and_tls_is_there_for_who_imports_it() -> None:
    program = """
import asyncio, hashlib, hmac, sys
print(hashlib.sha256(b"abc").hexdigest()[:16], hmac.new(b"Jefe", b"what do ya want for nothing?", "sha256").hexdigest()[:16])
print("_ssl" in sys.modules)
import ssl
print(ssl.create_default_context().verify_mode == ssl.CERT_REQUIRED, "None" in repr(sys.modules["ssl"]))
"""  # noqa: E501
    assert printed(program) == ["ba7816bf8f01cfea", "5bdcc146bf60754e", "False", "True", "False"]


def test_a_module_that_was_put_off_is_loaded_by_its_first_use() -> None:
    program = """
import base64, calendar, sys
from base64 import b64encode
before = hasattr(sys.modules["calendar"], "__file__")
print(b64encode(b"kv").decode(), base64.b64decode("a3Y=").decode(), before, calendar.timegm((1970, 1, 2, 0, 0, 0)))
import calendar
print(hasattr(calendar, "__file__"), hasattr(calendar, "no such name"))
"""
    assert printed(program) == ["a3Y=", "kv", "False", "86400", "True", "False"]


def test_messages_are_packed_and_shown_whatever_handles_them() -> None:
    program = """
from google.protobuf.internal import api_implementation
from kvstore_proto.v1 import kvstore_pb2
message = kvstore_pb2.Terms(ttl_s=60, pin="a")
print(api_implementation.Type(), kvstore_pb2.Terms.FromString(message.SerializeToString()) == message, *str(message).split())
"""  # noqa: E501
    for kind in ("upb", "python"):
        shown = printed(program, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=kind)
        assert shown == [kind, "True", "ttl_s:", "60", "pin:", '"a"']
