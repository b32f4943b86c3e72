"""The daemon: it owns the memory tiers of a node and serves K/V blocks to its engines.

`daemon.py` is the only file that knows all parts. Everything that holds state runs on one control thread (an asyncio
loop) without locks; bytes are moved by the tiers' own threads in calls that release the GIL.
"""

from kvstore_proto.version import VERSION

__version__ = VERSION
