"""`python -m kvstore_engine.worker SOCKET POOL MAILBOX`: three inherited descriptors. Started by `WorkerProcess`."""

import socket
import sys

from kvstore_engine.worker.child import serve

if __name__ == "__main__":
    handle, pool, mailbox = map(int, sys.argv[1:4])
    serve(socket.socket(fileno=handle), pool, mailbox)
