"""The identity of a KV block: a hash of its tokens and of everything before them.

Encoding, so that any language can compute the same hash:

    hash = SHA-256(canonical CBOR of [parent, tokens, extra_keys])

- `parent`: the 32-byte hash of the block before (a CBOR byte string), or null for the first block;
- `tokens`: the array of the block's token ids (unsigned integers), exactly block_size of them;
- `extra_keys`: an array of two-element arrays [kind, value], in this order: ["lora", name] in every
  block when an adapter is applied, ["salt", cache_salt] in the first block only. The kinds keep an
  adapter and a salt of the same text apart. The salt reaches later blocks through `parent`.

Canonical CBOR is RFC 8949, section 4.2.1 (shortest integers, definite lengths).
"""

import hashlib
from collections.abc import Sequence

import cbor2

from enginecore.request import Request

ExtraKeys = list[list[str]]


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys) -> bytes:
    """Hashes one full block; 32 bytes."""
    encoded = cbor2.dumps([parent, list(token_ids), extra_keys], canonical=True)
    return hashlib.sha256(encoded).digest()


def extra_keys_of(request: Request, block_index: int) -> ExtraKeys:
    """What beside tokens makes the contents of the request's block differ."""
    keys: ExtraKeys = []
    if request.lora_name is not None:
        keys.append(["lora", request.lora_name])
    if block_index == 0 and request.cache_salt is not None:
        keys.append(["salt", request.cache_salt])
    return keys


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Hashes the full blocks that the request got since the last call."""
    hashes = request.block_hashes
    parent = hashes[-1] if hashes else None
    for index in range(len(hashes), request.num_tokens // block_size):
        token_ids = request.token_ids(index * block_size, (index + 1) * block_size)
        parent = hash_block(parent, token_ids, extra_keys_of(request, index))
        hashes.append(parent)
