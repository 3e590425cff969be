from collections.abc import Sequence

from enginecore.kv_cache_manager import KVCacheManager
from enginecore.request import Request
from tests.unit.enginecore.builders import make_request

PREFIX = list(range(48))


def join(kv_cache: KVCacheManager, request: Request) -> tuple[list[int], list[int]] | None:
    """Finds, allocates the whole request; returns the hit and the new block ids."""
    hits, num_hit_tokens = kv_cache.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit_tokens
    new_ids = kv_cache.allocate_slots(request, num_new, hits)
    if new_ids is None:
        return None
    request.num_computed_tokens = request.num_tokens
    return [block.block_id for block in hits[0]], new_ids[0]


def ref_counts(kv_cache: KVCacheManager, ids: Sequence[int]) -> list[int]:
    return [kv_cache.pool.blocks[block_id].ref_count for block_id in ids]


def test_second_request_shares_the_prefix_b1_b2() -> None:
    """B1, B2"""
    kv_cache = KVCacheManager(11, 16)
    first, second = make_request(0, [*PREFIX, *[3] * 7]), make_request(1, [*PREFIX, *[4] * 5])
    assert join(kv_cache, first) == ([], [1, 2, 3, 4])
    assert kv_cache.pool.num_cached_blocks == 3
    assert join(kv_cache, second) == ([1, 2, 3], [5])
    assert ref_counts(kv_cache, [1, 2, 3, 4, 5]) == [2, 2, 2, 1, 1]
    kv_cache.free(first)
    assert kv_cache.free(second) == 4
    assert kv_cache.pool.free_block_ids() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_cached_blocks_are_evicted_tail_first_b2() -> None:
    """B2: the prefix head survives longest."""
    kv_cache = KVCacheManager(11, 16)
    first = make_request(0, [*PREFIX, 9])
    join(kv_cache, first)
    kv_cache.free(first)
    # 4 was not full; 5 to 10 are untouched; then the prefix from its end.
    assert join(kv_cache, make_request(1, [7] * 16 * 8)) == ([], [4, 5, 6, 7, 8, 9, 10, 3])
    third = make_request(2, [*PREFIX, 9])
    hits, num_hit_tokens = kv_cache.get_computed_blocks(third)
    assert [block.block_id for block in hits[0]] == [1, 2]
    assert num_hit_tokens == 32


def test_last_token_is_always_computed_b3() -> None:
    """B3: a prompt of exactly N cached blocks hits N - 1."""
    kv_cache = KVCacheManager(11, 16)
    first = make_request(0, PREFIX)
    join(kv_cache, first)
    kv_cache.free(first)
    assert kv_cache.get_computed_blocks(make_request(1, PREFIX))[1] == 32
    assert kv_cache.get_computed_blocks(make_request(2, [*PREFIX, 1]))[1] == 48


def test_prompt_logprobs_write_but_do_not_read_b3() -> None:
    """B3"""
    kv_cache = KVCacheManager(11, 16)
    first = make_request(0, [*PREFIX, 1], skip_reading_prefix_cache=True)
    join(kv_cache, first)
    second = make_request(1, [*PREFIX, 1], skip_reading_prefix_cache=True)
    assert kv_cache.get_computed_blocks(second)[1] == 0
    assert kv_cache.get_computed_blocks(make_request(2, [*PREFIX, 1]))[1] == 48


def test_failed_allocation_changes_nothing_b4() -> None:
    """B4"""
    kv_cache = KVCacheManager(11, 16)
    first = make_request(0, [*PREFIX, 1])
    join(kv_cache, first)
    kv_cache.free(first)
    holder = make_request(1, [8] * 16 * 4)
    join(kv_cache, holder)
    queue, refs = kv_cache.pool.free_block_ids(), ref_counts(kv_cache, range(11))
    # Six blocks are free, three of them the hit: four more are not there beside it.
    assert join(kv_cache, make_request(2, [*PREFIX, *[5] * 16 * 4])) is None
    assert kv_cache.pool.free_block_ids() == queue
    assert ref_counts(kv_cache, range(11)) == refs
    assert join(kv_cache, make_request(3, [*PREFIX, *[5] * 16 * 3])) is not None


def test_reset_waits_for_the_last_holder_b6() -> None:
    """B6"""
    kv_cache = KVCacheManager(11, 16)
    request = make_request(0, [*PREFIX, 1])
    join(kv_cache, request)
    assert not kv_cache.reset_prefix_cache()
    kv_cache.free(request)
    assert kv_cache.get_computed_blocks(make_request(1, [*PREFIX, 1]))[1] == 48
    assert kv_cache.reset_prefix_cache()
    assert kv_cache.get_computed_blocks(make_request(2, [*PREFIX, 1]))[1] == 0


def test_unwritten_blocks_are_not_found() -> None:
    kv_cache = KVCacheManager(11, 16)
    request = make_request(0, [*PREFIX, 1])
    join(kv_cache, request)
    kv_cache.free(request, num_valid_tokens=20)
    assert kv_cache.get_computed_blocks(make_request(1, [*PREFIX, 1]))[1] == 16


def test_without_caching_nothing_is_found_or_hashed() -> None:
    kv_cache = KVCacheManager(11, 16, enable_prefix_caching=False)
    request = make_request(0, [*PREFIX, 1])
    join(kv_cache, request)
    assert kv_cache.get_computed_blocks(make_request(1, [*PREFIX, 1]))[1] == 0
    assert request.block_hashes == []
    assert kv_cache.pool.num_cached_blocks == 0


def test_two_groups_have_tables_of_their_own() -> None:
    kv_cache = KVCacheManager(11, 16, num_groups=2)
    first = make_request(0, [*PREFIX, 1][:33])
    hits, _ = kv_cache.get_computed_blocks(first)
    assert kv_cache.allocate_slots(first, 33, hits) == [[1, 2, 3], [4, 5, 6]]
    hits, num_hit_tokens = kv_cache.get_computed_blocks(make_request(1, PREFIX))
    assert num_hit_tokens == 32
    assert [[block.block_id for block in hit] for hit in hits] == [[1, 2], [4, 5]]
    assert kv_cache.capacity_tokens == 80
    assert kv_cache.free(first) == 6
