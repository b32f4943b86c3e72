"""`python -m kvstore_engine.worker SOCKET MODEL POOL MAILBOX`: four inherited descriptors."""

import socket
import sys

from kvstore_engine.worker.child import serve

if __name__ == "__main__":
    handle, model, pool, mailbox = map(int, sys.argv[1:5])
    serve(socket.socket(fileno=handle), model, pool, mailbox)
