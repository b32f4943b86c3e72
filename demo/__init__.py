"""What `make demo` shows: one question, answered cold, from DRAM, from NVMe, after a crash, and past a damaged block."""
