#!/bin/sh
# libzmq 4.3.5 (pyzmq 27.1.0): unbind() of a listening socket does not only stop listening, as closing a listening TCP
# socket does. Every connection that was accepted there ends, too: a subscriber that was connected gets nothing more
# until the address is bound again. So unbind cannot be used to take no further connections while the present ones stay.
#
# Output seen:
#     before unbind: b'1'
#     after unbind: nothing
#     bound again: b'3'
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet pyzmq==27.1.0
"$place/venv/bin/python" - <<'PYTHON' | tee "$place/output"
import time

import zmq

context = zmq.Context()
publisher, subscriber = context.socket(zmq.PUB), context.socket(zmq.SUB)
publisher.linger = subscriber.linger = 0
publisher.bind("tcp://127.0.0.1:*")
address = publisher.last_endpoint.decode()
subscriber.connect(address)
subscriber.subscribe(b"")


def received(payload: bytes) -> str:
    """What the subscriber gets within three seconds of a message that is sent again and again."""
    end = time.monotonic() + 3
    while time.monotonic() < end:
        publisher.send(payload)
        if subscriber.poll(50):
            last = subscriber.recv()
            while subscriber.poll(50):
                last = subscriber.recv()
            return repr(last)
    return "nothing"


print("before unbind:", received(b"1"))
publisher.unbind(address)
time.sleep(0.5)
print("after unbind:", received(b"2"))
publisher.bind(address)
print("bound again:", received(b"3"))
PYTHON
printf "before unbind: b'1'\nafter unbind: nothing\nbound again: b'3'\n" | diff - "$place/output"
