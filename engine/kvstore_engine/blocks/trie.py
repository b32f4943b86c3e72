"""The prefixes that have blocks: a trie over engine blocks of tokens, per tenant.

The module owns nodes, the number of sequences that use each, and the order in which unused ones are evicted. It does
not allocate or free a block: it returns the block of a node that it drops, and `space.BlockSpace` releases it.

A node is one whole block of tokens after all the blocks above it. Its K/V are `ready`, or some sequence that uses it
will compute them. So a prefix is shared as soon as the first request for it is admitted, not only once it is computed.
Tokens are compared, not digests, and each tenant has its own root, so that no two tenants ever share a node.
Invariants: a sequence that uses a node uses all above it, so an unused node has only unused ones below; a ready node
has only ready ones above; an unused node is ready (its last user drops one that is not). So the least recently used
block always belongs to a leaf, and evicting one leaf at a time can free the blocks of all unused nodes.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence


class TrieNode:
    """A node of the prefix trie (the index of shared prefixes): one whole block of tokens that follows the blocks of
    the nodes above. `key` is its token ids as bytes, `block` the pool block with its K/V, `users` the number of
    sequences that use it. `ready`: its K/V are computed. `loader`: the sequence that restores it from the daemon.
    `requested`: the daemon was asked for it. `stored`: the daemon has it or soon will. `window`: its pool block for
    layers with a sliding window, or -1.
    """

    __slots__ = (
        "block",
        "children",
        "key",
        "last_used",
        "loader",
        "parent",
        "ready",
        "requested",
        "stored",
        "users",
        "window",
    )

    def __init__(self, parent: "TrieNode | None", key: bytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, TrieNode] = {}
        self.users = 0
        self.ready = False
        self.stored = False
        self.requested = False
        self.loader: object | None = None
        self.last_used = 0
        self.window = -1

    @property
    def is_attached(self) -> bool:
        """True while the node is in the prefix trie; False once it was removed from it."""
        return self.parent is not None and self.parent.children.get(self.key) is self


class PrefixTrie:
    """An index of the token prefixes whose K/V are in the pool: a tree for each tenant, whose nodes are whole blocks of
    tokens. `on_drop` is called with each node that is removed. It is for one thread.
    """

    def __init__(self, on_drop: Callable[[TrieNode], None] | None = None) -> None:
        self._roots: dict[str, TrieNode] = {}
        self._clock = 0
        # (last use, entry number, node): some nodes may be in use again, dropped, or no longer leaves.
        self._leaves: list[tuple[int, int, TrieNode]] = []
        self._entries = 0
        self.nodes = 0
        self.unused = 0
        self._on_drop = on_drop

    def match(self, tenant: str, keys: Sequence[bytes]) -> list[TrieNode]:
        """Return the nodes of the longest prefix of `keys` (the token ids of each block, as bytes) that `tenant` has in
        the index, whether their K/V are computed or not. The nodes get no new user.
        """
        node, path = self._roots.get(tenant), []
        for key in keys:
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def child(self, tenant: str, parent: TrieNode | None, key: bytes) -> TrieNode | None:
        """Return the node below `parent` whose block has the token ids `key` (as bytes), or None if it does not exist.
        `parent` None is the root of the `tenant`'s tree.
        """
        above = parent if parent is not None else self._roots.get(tenant)
        return above.children.get(key) if above is not None else None

    def use(self, node: TrieNode) -> None:
        """Add one user to `node`. The caller must be a user of all nodes above it already."""
        if not node.users:
            self.unused -= 1
        node.users += 1

    def add(self, tenant: str, parent: TrieNode | None, key: bytes, block: int) -> TrieNode:
        """Add a node for the block with the token ids `key` (as bytes) and the pool block `block` below `parent`, and
        return it. `parent` None is the root of the `tenant`'s tree. The node has one user, and its K/V count as not
        computed.
        """
        above = parent if parent is not None else self._roots.setdefault(tenant, TrieNode(None, b"", -1))
        assert key not in above.children, "the node is there already"
        node = above.children[key] = TrieNode(above, key, block)
        node.users = 1
        self.nodes += 1
        return node

    def release(self, path: Sequence[TrieNode]) -> list[int]:
        """Take one user from each node of `path`, which begins at the root. Nodes without users whose K/V were never
        computed are removed; return their pool blocks.
        """
        dropped = []
        self._clock += 1
        for node in reversed(path):
            node.users -= 1
            node.last_used = self._clock
            assert node.users >= 0, "left more often than used"
            if node.users:
                continue
            self.unused += 1
            if not node.ready:
                dropped.append(self._drop(node))
            elif not node.children:
                self._offer(node)
        return dropped

    def evict(self) -> int | None:
        """Remove the least recently used node that has no user and no node below it, and return its pool block. Return
        None if every node has a user.
        """
        while self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.is_attached and not node.users and not node.children and node.last_used == last_used:
                return self._drop(node)
        return None

    def prune(self, node: TrieNode) -> list[int]:
        """Remove `node`, which has no user, and all nodes below it. Return their pool blocks."""
        below = [node]
        for each in below:
            below.extend(each.children.values())
        return [self._drop(each) for each in reversed(below)]

    def __iter__(self) -> Iterator[tuple[str, TrieNode]]:
        """Yield all nodes with their tenants, parents first."""
        for tenant, root in self._roots.items():
            below = list(root.children.values())
            while below:
                node = below.pop()
                yield tenant, node
                below.extend(node.children.values())

    def _drop(self, node: TrieNode) -> int:
        parent = node.parent
        assert parent is not None and not node.users and not node.children
        del parent.children[node.key]
        self.nodes -= 1
        self.unused -= 1
        if self._on_drop is not None:
            self._on_drop(node)
        if not parent.children:
            if parent.parent is None:
                self._roots = {tenant: root for tenant, root in self._roots.items() if root is not parent}
            elif not parent.users:
                self._offer(parent)
        return node.block

    def _offer(self, node: TrieNode) -> None:
        self._entries += 1
        heapq.heappush(self._leaves, (node.last_used, self._entries, node))
        if len(self._leaves) > 2 * self.nodes + 64:
            self._leaves = [entry for entry in self._leaves if entry[2].is_attached and not entry[2].users]
            heapq.heapify(self._leaves)
