"""Block tables per KV cache group, and what all groups have in common.

Layers with the same kind of cache form a group with its own block table over the shared pool. Only
full attention exists: a group with a sliding window keeps all its blocks, which is correct and
merely holds more than it needs.
"""

from collections.abc import Sequence

from enginecore.block_pool import BlockPool, KVCacheBlock
from enginecore.request import Request

# One list of blocks per KV cache group.
GroupBlocks = tuple[list[KVCacheBlock], ...]


class SingleTypeKVCacheManager:
    """The block tables of one group under full attention: every token keeps its slot."""

    def __init__(self, pool: BlockPool, block_size: int, group_index: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._group_index = group_index
        self._blocks: dict[int, list[KVCacheBlock]] = {}
        self._num_cached: dict[int, int] = {}

    def find_longest_cache_hit(self, hashes: Sequence[bytes]) -> list[KVCacheBlock]:
        """The cached blocks of the longest prefix of `hashes`."""
        hit = []
        for block_hash in hashes:
            block = self._pool.get_cached_block((block_hash, self._group_index))
            if block is None:
                break
            hit.append(block)
        return hit

    def num_missing_blocks(self, handle: int, num_tokens: int, num_hit_blocks: int) -> int:
        """Blocks to allocate so that `num_tokens` tokens have slots."""
        num_held = len(self._blocks.get(handle, ())) + num_hit_blocks
        return max(0, -(-num_tokens // self._block_size) - num_held)

    def adopt(self, handle: int, hit: list[KVCacheBlock]) -> None:
        """Begins the request's table with cached blocks and takes hold of them."""
        self._pool.touch(hit)
        self._blocks.setdefault(handle, []).extend(hit)
        self._num_cached[handle] = len(hit)

    def extend(self, handle: int, count: int) -> list[KVCacheBlock]:
        """Appends `count` new blocks to the request's table and returns them."""
        blocks = self._pool.allocate(count)
        self._blocks.setdefault(handle, []).extend(blocks)
        return blocks

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Makes the full blocks among the first `num_tokens` tokens findable."""
        num_full = num_tokens // self._block_size
        num_cached = self._num_cached.get(request.handle, 0)
        if num_full <= num_cached:
            return
        blocks = self._blocks[request.handle]
        for index in range(num_cached, num_full):
            key = (request.block_hashes[index], self._group_index)
            self._pool.cache(blocks[index], key)
        self._num_cached[request.handle] = num_full

    def blocks_of(self, handle: int) -> list[KVCacheBlock]:
        """The request's table; empty when it holds none."""
        return self._blocks.get(handle, [])

    def free(self, handle: int, num_valid_tokens: int | None) -> int:
        """Drops the request's table; returns the number of blocks that became free.

        With `num_valid_tokens`, blocks beyond those tokens were never written: their contents must
        not be found.
        """
        blocks = self._blocks.pop(handle, [])
        self._num_cached.pop(handle, None)
        if num_valid_tokens is not None:
            for block in blocks[num_valid_tokens // self._block_size :]:
                self._pool.uncache(block)
        return self._pool.release(blocks)

    @property
    def num_tables(self) -> int:
        """Requests that hold blocks."""
        return len(self._blocks)


class KVCacheCoordinator:
    """Keeps the block tables of all groups in step: each answer holds for every group."""

    def __init__(self, pool: BlockPool, block_size: int, num_groups: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.managers = tuple(
            SingleTypeKVCacheManager(pool, block_size, index) for index in range(num_groups)
        )

    def find_longest_cache_hit(self, hashes: Sequence[bytes]) -> GroupBlocks:
        """Per group the cached blocks of the longest prefix that all groups have."""
        hits = [manager.find_longest_cache_hit(hashes) for manager in self.managers]
        length = min(len(hit) for hit in hits)
        return tuple(hit[:length] for hit in hits)

    def can_allocate(self, handle: int, num_tokens: int, hits: GroupBlocks | None) -> bool:
        """Whether the pool can give `num_tokens` slots beside keeping the hit blocks."""
        needed = 0
        for index, manager in enumerate(self.managers):
            hit = hits[index] if hits is not None else ()
            needed += manager.num_missing_blocks(handle, num_tokens, len(hit))
            # A hit that nobody holds is still counted among the free blocks.
            needed += sum(block.ref_count == 0 for block in hit)
        return needed <= self._pool.num_free_blocks

    def adopt(self, handle: int, hits: GroupBlocks) -> None:
        """Begins the request's tables with cached blocks."""
        for manager, hit in zip(self.managers, hits, strict=True):
            manager.adopt(handle, hit)

    def extend(self, handle: int, num_tokens: int) -> list[list[int]]:
        """Allocates what is missing for `num_tokens` slots; returns the new block ids per group."""
        new_ids = []
        for manager in self.managers:
            count = manager.num_missing_blocks(handle, num_tokens, 0)
            new_ids.append([block.block_id for block in manager.extend(handle, count)])
        return new_ids

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Makes the full blocks among the first `num_tokens` tokens findable."""
        for manager in self.managers:
            manager.cache_full_blocks(request, num_tokens)

    def free(self, handle: int, num_valid_tokens: int | None) -> int:
        """Drops the request's tables; returns the number of blocks that became free."""
        return sum(manager.free(handle, num_valid_tokens) for manager in self.managers)
