"""The machine's memory that can be used without pushing other processes out. Pure, except that it reads the kernel's
file.
"""

from pathlib import Path


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes of this machine's memory can be used without swapping other processes out, as the kernel
    estimates in the file `meminfo`.
    """
    lines = (line.split() for line in meminfo.read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
