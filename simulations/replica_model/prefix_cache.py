"""A two-tier prefix cache: a radix tree over chained page keys, on the device and, written through, on the host.

Theory
------
A *node* is a run of pages. Because keys are chained, a node matches to its end if its last key does, and where a match
ends inside a node is found by bisection: a walk costs a few lookups whatever the prompt's length.

Each node holds its first `device` pages on the device and its first `host` pages on the host; it is as long as the
larger of the two. Both tiers are prefix-closed over the tree: a page is there only if all before it are. Hence only
tails are ever evicted, which is what SGLang's leaf eviction does.

*Locks.* A running turn pins the node where its known prefix ends. `pins` counts a node's own locks and its children
that are pinned, so pinning stops at the first ancestor that already is, and a node with `pins == 0` has nothing pinned
below it: all of it may go.

*LRU.* Any use of a node is a use of its ancestors, so only the node where a use ends is stamped, and its time goes to
its parent when it is gone. Leaves wait in a heap by time; entries that no longer hold are skipped when they come up.

*Cuts.* A turn that continues where a leaf ends extends that leaf, which keeps paths short (a session of two hundred
turns is one node, not four hundred). SGLang makes a node each time and evicts whole nodes; `cuts` remembers where
those nodes would end, and eviction takes a tail back to the last cut.

Source: SGLang 0.5.23, mem_cache/unified_radix_cache.py and mem_cache/unified_cache/unified_tree_core.py (match,
insert, split, leaf eviction, write-through with ancestors first, host leaves evicted only once they are off the
device). Not modelled: the time a backup takes (a page is on the host once computed), hit-count thresholds, storage.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

__all__ = ["Node", "PrefixCache"]

_HEAP_SLACK = 64
"""A heap is cleaned when it has more than twice as many entries as there are nodes, and this many more."""


class Node:
    """A run of pages; see the module. Lists nothing of the turns that use it."""

    __slots__ = (
        "children",
        "cuts",
        "device",
        "device_children",
        "end",
        "host",
        "keys",
        "parent",
        "pins",
        "serial",
        "start",
        "used_s",
    )

    def __init__(self, parent: Node | None, start: int, keys: array[int], serial: int, used_s: float) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(keys)
        self.keys = keys
        self.serial = serial
        self.used_s = used_s
        self.children: dict[int, Node] = {}
        self.cuts: list[int] = []
        self.device = 0
        self.host = 0
        self.device_children = 0
        self.pins = 0


_Entry = tuple[float, int, Node]
"""Of a heap: the time of last use, a serial number that breaks ties, the node. Stale when the node's time has moved."""


class PrefixCache:
    """The cache of one replica; sizes in pages.

    It knows the device's capacity only through `evict`, which the model calls for the pages it needs: the rest of the
    device is held by running turns.
    """

    def __init__(self, host_pages: int = 0) -> None:
        self.host_capacity = host_pages
        self._serial = 0
        self.clear()
        self.evicted_device_pages = 0
        self.evicted_host_pages = 0
        self.backed_up_pages = 0

    def clear(self) -> None:
        """Forget everything; nothing may be pinned."""
        self.root = Node(None, 0, array("Q"), 0, 0.0)
        self.device_pages = 0
        self.host_pages = 0
        self.pinned_pages = 0
        """Device pages of pinned nodes."""
        self._nodes = 0
        self._device_heap: list[_Entry] = []
        self._host_heap: list[_Entry] = []

    @property
    def evictable_pages(self) -> int:
        """Device pages that `evict` can free."""
        return self.device_pages - self.pinned_pages

    def match(self, keys: Sequence[int], limit: int) -> tuple[int, int]:
        """How many of the first `limit` pages are there: (on the device, on the device or on the host)."""
        node, depth, device = self.root, 0, -1
        while depth < limit:
            child = node.children.get(keys[depth])
            if child is None:
                break
            end = child.end
            whole = end <= limit and child.keys[-1] == keys[end - 1]
            reach = end if whole else depth + _common(child, keys, limit)
            if device < 0 and child.start + child.device < reach:
                device = child.start + child.device
            depth = reach
            if not whole:
                break
            node = child
        return (depth if device < 0 else device), depth

    def pin(self, keys: Sequence[int], pages: int, now_s: float) -> Node:
        """Lock the first `pages` pages, which must match, and return the node where they end."""
        node = self.root
        while node.end < pages:
            child = node.children[keys[node.end]]
            if child.end > pages:
                child = self._split(child, pages - child.start)
            node = child
        node.used_s = now_s
        self._pin(node)
        return node

    def release(self, node: Node, now_s: float) -> None:
        """Undo one `pin`."""
        node.used_s = max(node.used_s, now_s)
        self._unpin(node)

    def load(self, node: Node) -> None:
        """Bring the path to `node`, which must be pinned, onto the device; the caller has made room."""
        path = []
        while node.parent is not None and node.device < len(node.keys):
            path.append(node)
            node = node.parent
        for each in path:
            self._to_device(each)

    def insert(self, tip: Node, keys: Sequence[int], pages: int, now_s: float) -> Node:
        """Keep pages that a turn has computed, from the end of its pinned `tip` to `pages`.

        Returns the node where they end, pinned instead of `tip`. `device_pages` grows only by those that were not on
        the device before: the rest are duplicates, whose memory is free again.
        """
        node, depth = tip, tip.end
        while depth < pages:
            child = node.children.get(keys[depth])
            if child is None:
                break
            shared = _common(child, keys, pages)
            if shared < len(child.keys):
                child = self._split(child, shared)
            if child.device < len(child.keys):
                self._to_device(child)
            node, depth = child, child.end
        if depth < pages:
            node = self._append(node, tip, array("Q", keys[depth:pages]), now_s)
        node.used_s = now_s
        if node is not tip:
            self._pin(node)
            self._unpin(tip)
        self._back_up(node)
        return node

    def evict(self, pages: int) -> int:
        """Free at least `pages` device pages, the least recently used leaves first, or all that can be; how many."""
        freed, heap = 0, self._device_heap
        while freed < pages and heap:
            used_s, _, node = heappop(heap)
            if node.used_s != used_s or not self._device_leaf(node):
                continue
            # The node stays the oldest until it is gone, so as many cuts as are needed go at once.
            end = node.start + node.device
            cut = _last_cut(node, max(end - (pages - freed), node.start) + 1)
            freed += end - cut
            self._shrink_device(node, cut - node.start)
        self.evicted_device_pages += freed
        return freed

    def __iter__(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _device_leaf(self, node: Node) -> bool:
        return node.device > 0 and node.device_children == 0 and node.pins == 0

    def _offer(self, node: Node) -> None:
        """Put a node into the heaps where it may now be evicted."""
        if node.pins or node.parent is None:
            return
        entry = (node.used_s, node.serial, node)
        if node.device and not node.device_children:
            heappush(self._device_heap, entry)
            if len(self._device_heap) > 2 * self._nodes + _HEAP_SLACK:
                self._device_heap = _cleaned(self._device_heap, self._device_leaf)
        if node.host > node.device and not node.children:
            heappush(self._host_heap, entry)
            if len(self._host_heap) > 2 * self._nodes + _HEAP_SLACK:
                self._host_heap = _cleaned(self._host_heap, _host_leaf)

    def _pin(self, node: Node | None) -> None:
        while node is not None:
            node.pins += 1
            if node.pins > 1:
                return
            self.pinned_pages += node.device
            node = node.parent

    def _unpin(self, node: Node | None) -> None:
        while node is not None:
            node.pins -= 1
            if node.pins:
                return
            self.pinned_pages -= node.device
            self._offer(node)
            node = node.parent

    def _split(self, node: Node, pages: int) -> Node:
        """Cut a node after `pages` of its pages; the upper part is new, the lower keeps its identity and its locks."""
        parent = node.parent
        assert parent is not None
        self._serial += 1
        self._nodes += 1
        upper = Node(parent, node.start, node.keys[:pages], self._serial, node.used_s)
        parent.children[upper.keys[0]] = upper
        node.parent, node.keys, node.start = upper, node.keys[pages:], node.start + pages
        upper.children[node.keys[0]] = node
        upper.cuts = node.cuts[: bisect_left(node.cuts, node.start)]
        node.cuts = node.cuts[bisect_right(node.cuts, node.start) :]
        upper.device, node.device = min(node.device, pages), max(0, node.device - pages)
        upper.host, node.host = min(node.host, pages), max(0, node.host - pages)
        upper.device_children = int(node.device > 0)
        upper.pins = int(node.pins > 0)
        self._offer(upper)
        return upper

    def _append(self, node: Node, tip: Node, keys: array[int], now_s: float) -> Node:
        """New device pages below `node`: in it, if it is a leaf that only this turn's pin holds, else in a child."""
        added = len(keys)
        self.device_pages += added
        alone = node.pins == int(node is tip)
        if node.parent is not None and not node.children and alone and node.device == len(node.keys):
            node.cuts.append(node.end)
            node.keys.extend(keys)
            node.end += added
            node.device += added
            if node.pins:
                self.pinned_pages += added
            return node
        self._serial += 1
        self._nodes += 1
        child = Node(node, node.end, keys, self._serial, now_s)
        node.children[keys[0]] = child
        node.device_children += 1
        child.device = added
        return child

    def _to_device(self, node: Node) -> None:
        missing = len(node.keys) - node.device
        if not node.device and node.parent is not None:
            node.parent.device_children += 1
        node.device += missing
        self.device_pages += missing
        if node.pins:
            self.pinned_pages += missing

    def _back_up(self, node: Node) -> None:
        """Write-through, ancestors first; a node for which the host has no room is left out, and so are those below."""
        if not self.host_capacity:
            return
        path = []
        while node.parent is not None and node.host < node.device:
            path.append(node)
            node = node.parent
        for each in reversed(path):
            missing = each.device - each.host
            room = self.host_capacity - self.host_pages
            if missing > room and self._evict_host(missing - room) < missing - room:
                return
            each.host += missing
            self.host_pages += missing
            self.backed_up_pages += missing

    def _evict_host(self, pages: int) -> int:
        freed, heap = 0, self._host_heap
        while freed < pages and heap:
            used_s, _, node = heappop(heap)
            if node.used_s != used_s or not _host_leaf(node):
                continue
            cut = max(_last_cut(node, node.start + node.host), node.start + node.device)
            dropped = node.start + node.host - cut
            freed += dropped
            node.host -= dropped
            self.host_pages -= dropped
            self._trim(node)
        self.evicted_host_pages += freed
        return freed

    def _shrink_device(self, node: Node, pages: int) -> None:
        parent = node.parent
        assert parent is not None
        self.device_pages -= node.device - pages
        node.device = pages
        if not pages:
            parent.device_children -= 1
            parent.used_s = max(parent.used_s, node.used_s)
        self._trim(node)
        if not pages:
            self._offer(parent)

    def _trim(self, node: Node) -> None:
        """Drop the keys of pages that are nowhere any more, and the node with its last."""
        left = max(node.device, node.host)
        if left == 0:
            parent = node.parent
            assert parent is not None
            del parent.children[node.keys[0]]
            self._nodes -= 1
            parent.used_s = max(parent.used_s, node.used_s)
            self._offer(parent)
            return
        if node.end == node.start + left:
            self._offer(node)
            return
        del node.keys[left:]
        node.end = node.start + left
        del node.cuts[bisect_left(node.cuts, node.end) :]
        self._offer(node)


def _host_leaf(node: Node) -> bool:
    return node.host > node.device and not node.children and node.pins == 0


def _common(node: Node, keys: Sequence[int], limit: int) -> int:
    """How many pages of `node`, whose first matches, are in `keys[:limit]`: chained keys agree up to one point."""
    low, high = 1, min(len(node.keys), limit - node.start)
    if node.keys[high - 1] == keys[node.start + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if node.keys[middle] == keys[node.start + middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _last_cut(node: Node, before: int) -> int:
    """The depth to which a tail that ends at `before` is taken back."""
    index = bisect_left(node.cuts, before)
    return node.cuts[index - 1] if index else node.start


def _cleaned(heap: list[_Entry], holds: Callable[[Node], bool]) -> list[_Entry]:
    """The entries of a heap that still hold, each node once."""
    kept = list({entry[1]: entry for entry in heap if entry[2].used_s == entry[0] and holds(entry[2])}.values())
    heapify(kept)
    return kept
