"""The device operations of the model code: one file per op.

Each file has the public function that model code calls and a torch reference, which is the oracle
that every faster implementation is tested against.

KV cache layout, which `reshape_and_cache` writes and `paged_attention` reads: per layer one key
and one value tensor, each `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous. Token
`t` of a request lives in slot `block_ids[t // block_size] * block_size + t % block_size`. Block 0
is the null block: never owned by a request, so padding may point at it.
"""
