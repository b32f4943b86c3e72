"""How much memory of the machine can be had without pushing other processes out. Pure, but for the kernel's file."""

from pathlib import Path


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The kernel's estimate."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
