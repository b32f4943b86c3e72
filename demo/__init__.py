"""What `make demo` shows: one question, answered cold, from DRAM, from NVMe, after a crash, past a damaged block."""
