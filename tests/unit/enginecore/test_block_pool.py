import pytest

from enginecore.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


def test_free_queue_takes_from_both_ends_and_the_middle_b2() -> None:
    """B2"""
    blocks = [KVCacheBlock(index) for index in range(5)]
    queue = FreeKVCacheBlockQueue(blocks)
    queue.remove(blocks[2])
    assert queue.popleft() is blocks[0]
    queue.append(blocks[2])
    queue.prepend(blocks[0])
    assert [block.block_id for block in queue] == [0, 1, 3, 4, 2]
    assert queue.num_free_blocks == 5


def test_free_queue_refuses_to_pop_when_empty_b2() -> None:
    """B2"""
    queue = FreeKVCacheBlockQueue([KVCacheBlock(1)])
    block = queue.popleft()
    assert queue.num_free_blocks == 0
    with pytest.raises(IndexError):
        queue.popleft()
    with pytest.raises(ValueError, match="block 1 is not free"):
        queue.remove(block)


def test_pool_never_gives_the_null_block() -> None:
    pool = BlockPool(4)
    assert [block.block_id for block in pool.allocate(3)] == [1, 2, 3]
    with pytest.raises(IndexError):
        pool.allocate(1)


def test_pool_forgets_a_reused_block_and_keeps_a_held_one_b2() -> None:
    """B2: a referenced cached block is never evicted; a reused one loses its old hash first."""
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache(first, (b"first", 0))
    pool.cache(second, (b"second", 0))
    pool.release([second])
    assert [block.block_id for block in pool.allocate(2)] == [3, 2]
    assert pool.get_cached_block((b"second", 0)) is None
    assert pool.get_cached_block((b"first", 0)) is first


def test_pool_finds_the_first_of_two_equal_blocks() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache(first, (b"same", 0))
    pool.cache(second, (b"same", 0))
    pool.uncache(second)
    assert pool.get_cached_block((b"same", 0)) is first


def test_pool_resets_only_when_idle() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.cache(blocks[0], (b"hash", 0))
    assert not pool.reset_cache()
    assert pool.num_cached_blocks == 1
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.num_cached_blocks == 0
