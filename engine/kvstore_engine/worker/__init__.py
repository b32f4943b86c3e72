"""ggml in a process of its own: an `Executor` whose abort leads to a restart of the process, not of the server.

ggml answers a broken invariant with abort(), and the kernel answers too much memory with SIGKILL; neither can be
caught. So the steps run in a child. The pool's K/V are in memory that both processes map and the parent owns: a new
child finds all of them, and the step that killed the old one is computed again.
"""

from kvstore_engine.worker.remote import EngineWorkerNotice, RemoteExecutor, StepFailed

__all__ = ["RemoteExecutor", "StepFailed", "EngineWorkerNotice"]
