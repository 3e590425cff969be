"""Writes new keys and values into the paged KV cache (its layout: see the package)."""

from torch import Tensor


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Stores each token's key and value in its slot.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`; may be a strided view.
        value: like `key`.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, written in place.
        value_cache: like `key_cache`.
        slot_mapping: `[num_tokens]` int64, each token's slot; slots of one call differ.
    """
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def reshape_and_cache_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The oracle of `reshape_and_cache`: one token at a time."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]
