"""What the scheduler asks of the KV cache: find, allocate, free."""

from enginecore.block_hash import extend_block_hashes
from enginecore.block_pool import BlockPool
from enginecore.kv_cache_coordinator import GroupBlocks, KVCacheCoordinator
from enginecore.request import Request


class KVCacheManager:
    """Block tables of all live requests over one BlockPool.

    Not thread-safe: the engine's task is its only caller. A request's blocks are freed by whoever
    took it from the batch, exactly once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.coordinator = KVCacheCoordinator(self.pool, block_size, num_groups)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the whole pool can hold."""
        return self.pool.num_usable_blocks // self.num_groups * self.block_size

    @property
    def usage_ratio(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.pool.num_free_blocks / self.pool.num_usable_blocks

    def get_computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """The cached blocks of the request's longest known prefix, and its length in tokens.

        At least the last token is left to compute, because its logits are what is wanted. Takes no
        hold of the blocks: `allocate_slots` does.
        """
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return tuple([] for _ in range(self.num_groups)), 0
        extend_block_hashes(request, self.block_size)
        max_hit_blocks = (request.num_tokens - 1) // self.block_size
        hits = self.coordinator.find_longest_cache_hit(request.block_hashes[:max_hit_blocks])
        return hits, len(hits[0]) * self.block_size

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hits: GroupBlocks | None = None
    ) -> list[list[int]] | None:
        """Gives slots to the next `num_new_tokens` tokens; returns the new block ids per group.

        `hits` are the cached blocks that a request without blocks begins with; they are not among
        the ids returned. Returns None, changing nothing, when blocks are short.
        """
        num_hit_tokens = len(hits[0]) * self.block_size if hits is not None else 0
        num_tokens = request.num_computed_tokens + num_hit_tokens + num_new_tokens
        if not self.coordinator.can_allocate(request.handle, num_tokens, hits):
            return None
        if hits is not None:
            self.coordinator.adopt(request.handle, hits)
        new_ids = self.coordinator.extend(request.handle, num_tokens)
        request.num_slots = self.num_blocks_of(request.handle) * self.block_size
        if self.enable_prefix_caching:
            # Findable from now on, before they are written: the worker runs steps in order and
            # writes a step's keys and values before it reads any, so a later taker finds them.
            extend_block_hashes(request, self.block_size)
            self.coordinator.cache_full_blocks(request, min(num_tokens, request.num_tokens))
        return new_ids

    def free(self, request: Request, num_valid_tokens: int | None = None) -> int:
        """Drops the request's blocks; returns how many became free.

        Give `num_valid_tokens` when the tokens beyond it were allocated but never computed.
        """
        request.num_slots = 0
        return self.coordinator.free(request.handle, num_valid_tokens)

    def block_ids(self, handle: int) -> list[list[int]]:
        """The request's block ids per group."""
        return [
            [block.block_id for block in manager.blocks_of(handle)]
            for manager in self.coordinator.managers
        ]

    def blocks_after(self, handle: int, num_tokens: int) -> set[int]:
        """The ids of the request's blocks that are not full with its first `num_tokens` tokens."""
        first = num_tokens // self.block_size
        return {block_id for ids in self.block_ids(handle) for block_id in ids[first:]}

    def num_blocks_of(self, handle: int) -> int:
        """Blocks that the request holds in one group."""
        return len(self.coordinator.managers[0].blocks_of(handle))

    def reset_prefix_cache(self) -> bool:
        """Forgets all prefixes. Returns False, changing nothing, while a block is in use."""
        return self.pool.reset_cache()
