import hashlib
from typing import Any

import pytest

from enginecore.block_hash import extend_block_hashes, hash_block
from enginecore.request import Request
from tests.unit.enginecore.builders import make_request

EITHER: list[dict[str, Any]] = [{"cache_salt": "x"}, {"lora_name": "x"}]


def hashes_of(request: Request, block_size: int = 16) -> list[bytes]:
    extend_block_hashes(request, block_size)
    return request.block_hashes


def test_hash_is_the_documented_encoding() -> None:
    # [null, [1, 24, 500], [["salt", "s"]]] in canonical CBOR, by hand.
    encoded = bytes.fromhex("83f683011818 1901f4 81 82 6473616c74 6173")
    expected = hashlib.sha256(encoded).digest()
    assert hash_block(None, [1, 24, 500], [["salt", "s"]]) == expected


def test_only_full_blocks_have_hashes_and_they_chain() -> None:
    request = make_request(1, list(range(40)))
    first, second = hashes_of(request)
    assert second == hash_block(first, list(range(16, 32)), [])
    for token_id in range(40, 48):
        request.append_output(token_id)
    assert hashes_of(request) == [first, second, hash_block(second, list(range(32, 48)), [])]


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "x"},
        {"lora_name": "x"},
        {"lora_name": "x", "cache_salt": "x"},
        {"cache_salt": "y"},
    ],
)
def test_extra_keys_keep_requests_apart_b5(other: dict[str, Any]) -> None:
    """B5: an adapter "x" and a salt "x" do not collide, and reach every later block."""
    plain = hashes_of(make_request(1, list(range(48))))
    salted = hashes_of(make_request(1, list(range(48)), **other))
    for kinds in EITHER:
        if kinds != other:
            assert not set(salted) & set(hashes_of(make_request(1, list(range(48)), **kinds)))
    assert not set(plain) & set(salted)
