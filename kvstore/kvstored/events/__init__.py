"""KV events for routers: which blocks are stored where, in vLLM's format, published by a process of their own.

The control thread appends records (`feed`, `records`) and hands them to that process (`publisher`). In the process,
`stream` makes events of them, `encoding` their bytes, and `worker` sends them. The daemon itself never loads ZMQ.
"""
