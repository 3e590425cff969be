"""The KV cache's blocks: which are free, which are shared, which hold a known prefix."""

from collections.abc import Iterable, Iterator, Sequence

# The hash of a block's contents and the KV cache group that holds them.
BlockKey = tuple[bytes, int]


class KVCacheBlock:
    """One block of the KV cache. Counts its holders; knows its neighbours while it is free."""

    __slots__ = ("block_id", "key", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None


class FreeKVCacheBlockQueue:
    """The free blocks in the order in which they will be used again.

    Doubly linked through the blocks themselves, so that a cached block that is asked for again
    leaves from the middle in constant time and no operation allocates.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        _link(self._head, self._tail)
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        """Takes the block to use next. Raises IndexError when none is free."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block from wherever it is. Raises ValueError when it is not in the queue."""
        if block.prev_free is None or block.next_free is None:
            raise ValueError(f"block {block.block_id} is not free")
        _link(block.prev_free, block.next_free)
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Puts a block where it is used last."""
        assert self._tail.prev_free is not None
        self._insert_after(self._tail.prev_free, block)

    def prepend(self, block: KVCacheBlock) -> None:
        """Puts a block where it is used next."""
        self._insert_after(self._head, block)

    def _insert_after(self, previous: KVCacheBlock, block: KVCacheBlock) -> None:
        following = previous.next_free
        assert following is not None
        _link(previous, block)
        _link(block, following)
        self.num_free_blocks += 1


class BlockPool:
    """All blocks of the KV cache. Block 0 is the null block: never free, never written.

    A block with holders is never evicted. A free block keeps its contents' key until it is used
    again, so a request with the same prefix can take it back.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("the KV cache needs at least one block beside the null block")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self._free = FreeKVCacheBlockQueue(self.blocks[1:])
        self._cached: dict[BlockKey, KVCacheBlock] = {}

    @property
    def num_usable_blocks(self) -> int:
        """Blocks in all, without the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._free.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose contents can be found."""
        return len(self._cached)

    def free_block_ids(self) -> list[int]:
        """The free blocks, the next to be used first."""
        return [block.block_id for block in self._free]

    def get_cached_block(self, key: BlockKey) -> KVCacheBlock | None:
        """Finds the block with these contents; takes no hold of it."""
        return self._cached.get(key)

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Takes `count` free blocks, forgetting what they held. Raises IndexError if too few."""
        if count > self._free.num_free_blocks:
            raise IndexError(f"{count} blocks asked for, {self._free.num_free_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self.uncache(block)
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a holder to each block; a free one leaves the free queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def release(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Takes a holder from each block, given in the order of a sequence; returns how many freed.

        The sequence's end is used again before its beginning, because more requests share
        beginnings; blocks that nothing can find are used before any cached one.
        """
        freed = []
        for block in reversed(blocks):
            block.ref_count -= 1
            if block.ref_count == 0:
                freed.append(block)
        for block in reversed(freed):
            if block.key is None:
                self._free.prepend(block)
        for block in freed:
            if block.key is not None:
                self._free.append(block)
        return len(freed)

    def cache(self, block: KVCacheBlock, key: BlockKey) -> None:
        """Makes the block's contents findable, unless another block with the same ones is."""
        if block.key is None and key not in self._cached:
            self._cached[key] = block
            block.key = key

    def uncache(self, block: KVCacheBlock) -> None:
        """Makes the block's contents not findable."""
        if block.key is not None:
            del self._cached[block.key]
            block.key = None

    def reset_cache(self) -> bool:
        """Forgets all contents. Returns False, changing nothing, while a block has a holder."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in list(self._cached.values()):
            self.uncache(block)
        return True


def _link(left: KVCacheBlock, right: KVCacheBlock) -> None:
    left.next_free = right
    right.prev_free = left
