"""llama.cpp's server out of the wheel `xllamacpp`, in a process of its own.

    python -m kvstore_engine.bench.llama_wheel MODEL SETTINGS

The module translates settings. The server is the stock one and listens on a free port; it ends when the parent closes
its input. Any question is answered with its address.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kvstore_engine.bench.child import answer_questions


def serve(model: str, settings: dict[str, Any]) -> str:
    """Start llama.cpp's server, from the wheel `xllamacpp`, with the model file `model` in this process, and return its
    address. `settings` are the fields of `servers.LlamaServerSettings`.
    """
    import xllamacpp

    wanted = xllamacpp.CommonParams()
    wanted.model.path = model
    wanted.n_parallel, wanted.kv_unified = settings["sequences"], settings["unified"]
    wanted.n_ctx = settings["context"] or 0
    wanted.cache_ram_mib = settings["cache_ram_mib"]
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = settings["threads"]
    wanted.n_threads_http = max(2, settings["sequences"] + 2)
    wanted.ui, wanted.verbosity = False, 1  # errors only
    kinds = xllamacpp.llama_flash_attn_type
    wanted.flash_attn_type = {
        True: kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        False: kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        None: kinds.LLAMA_FLASH_ATTN_TYPE_AUTO,
    }[settings["flash"]]
    server = xllamacpp.Server(wanted)
    _KEPT.append(server)
    return str(server.listening_address)


_KEPT: list[object] = []


def main(arguments: list[str]) -> None:
    address = serve(arguments[0], json.loads(arguments[1]))
    answer_questions(lambda question: address)


if __name__ == "__main__":
    main(sys.argv[1:])
