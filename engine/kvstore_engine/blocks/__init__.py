"""Engine blocks and their holders: block tables, reference counts, copy-on-write, prefix trie, swap, compaction."""
