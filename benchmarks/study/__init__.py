"""The policy study: which traces, what is replayed on them, what an oracle would add, and the tables made of it."""
