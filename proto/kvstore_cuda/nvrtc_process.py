"""The process that one compilation has for itself: NVRTC can crash, which an engine with requests under way must not.

    python -m kvstore_cuda.nvrtc_process SOURCE ARCHITECTURE [OPTION ...]

writes a line with the bytes of the code and of the log, then both. It exits with 1 and the reason on standard error
where the source does not compile.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvstore_cuda.nvrtc import CompileError, call, library


def compiled(source: Path, architecture: str, options: list[str]) -> tuple[bytes, bytes]:
    """The cubin, or PTX where the architecture is virtual, and the log. Raises CompileError; where the source does not
    compile its message is the log."""
    words = [option.encode() for option in (f"--gpu-architecture={architecture}", *options)]
    handle = call("nvrtcCreateProgram", source.read_bytes(), source.name.encode(), 0, [], [])
    try:
        (code,) = library().nvrtcCompileProgram(handle, len(words), words)
        log = _filled("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", handle).rstrip(b"\0")
        if code != 0:
            raise CompileError(log.decode() or f"error {int(code)}")
        kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
        return _filled(f"nvrtcGet{kind}Size", f"nvrtcGet{kind}", handle), log
    finally:
        library().nvrtcDestroyProgram(handle)


def _filled(size_call: str, get_call: str, handle: Any) -> bytes:
    buffer = bytearray(call(size_call, handle))
    call(get_call, handle, buffer)
    return bytes(buffer)


def main(arguments: list[str]) -> int:
    source, architecture, *options = arguments
    try:
        code, log = compiled(Path(source), architecture, options)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(b"%d %d\n" % (len(code), len(log)) + code + log)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
