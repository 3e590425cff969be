"""A worker's batch, rebuilt from the step stream's deltas alone, with a model of the KV cache.

The cache model holds, per slot, a digest of all tokens up to the one whose keys and values would be
there. A step first writes the slots of its tokens, then checks every slot up to each request's end:
a wrong block table, a shared block written by two, a cached prefix that was never computed or a
token lost on the way all show as a wrong digest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from seamline.worker.v1 import worker_pb2

EOS = 0
_MODULUS = (1 << 61) - 1


class ShadowMismatchError(AssertionError):
    """The stream told something impossible."""


def digest(previous: int, token_id: int) -> int:
    """The digest of a sequence that goes on with `token_id`."""
    return (previous * 1_000_003 + token_id * 7_919 + 12_345) % _MODULUS


def next_token(tokens_digest: int, vocab_size: int) -> int:
    """The token that the fake model says after a sequence; never the end of sequence."""
    return 1 + (tokens_digest >> 7) % (vocab_size - 1)


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int = 1000) -> list[int]:
    """What the fake model generates after a prompt."""
    state = 0
    for token_id in prompt:
        state = digest(state, token_id)
    output = []
    for _ in range(count):
        output.append(next_token(state, vocab_size))
        state = digest(state, output[-1])
    return output


@dataclass
class ShadowRequest:
    """A request of the batch."""

    request_id: str
    seed: int
    num_prompt_tokens: int
    token_ids: list[int]
    block_ids: list[list[int]]
    num_computed_tokens: int
    traceparent: str
    digests: list[int] = field(default_factory=list)

    def digest_at(self, position: int) -> int:
        """The digest of the tokens up to and with `position`."""
        while len(self.digests) <= position:
            previous = self.digests[-1] if self.digests else 0
            self.digests.append(digest(previous, self.token_ids[len(self.digests)]))
        return self.digests[position]


@dataclass
class ShadowBatch:
    """The requests that the worker holds, and the contents of its cache."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    requests: dict[int, ShadowRequest] = field(default_factory=dict)
    scheduled: dict[int, int] = field(default_factory=dict)
    most_held: int = 0
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def run(self, message: worker_pb2.SchedulerOutput) -> dict[int, list[int]]:
        """Applies a step and computes it; the sampled tokens per request."""
        self.apply(message)
        self._write()
        return {handle: self._read(handle) for handle in self.scheduled}

    def apply(self, message: worker_pb2.SchedulerOutput) -> None:
        """Purges, adds, updates, in the order of the contract."""
        self.scheduled = {}
        for handle in (*message.finished_handles, *message.preempted_handles):
            require(handle in self.requests, f"{handle} leaves but is not held")
            del self.requests[handle]
        for new in message.scheduled_new_reqs:
            self._add(new)
        self._update(message.scheduled_cached_reqs)
        self.most_held = max(self.most_held, len(self.requests))
        require(len(self.requests) <= self.max_num_seqs, "more requests than max_num_seqs (A14)")
        total = sum(self.scheduled.values())
        require(total <= self.max_num_batched_tokens, f"{total} tokens are over the budget")

    def _add(self, new: worker_pb2.NewRequestData) -> None:
        require(new.handle not in self.requests, f"{new.handle} is new but held already")
        require(new.sampling_params.HasField("seed"), "the seed is always set")
        self.requests[new.handle] = ShadowRequest(
            new.request_id,
            new.sampling_params.seed,
            len(new.prompt_token_ids),
            [*new.prompt_token_ids, *new.output_token_ids],
            [list(ids.ids) for ids in new.block_ids],
            new.num_computed_tokens,
            new.traceparent,
        )
        self._schedule(new.handle, new.num_scheduled_tokens)

    def _update(self, cached: worker_pb2.CachedRequestData) -> None:
        block = iter(cached.new_block_ids)
        counts = iter(cached.num_new_blocks)
        rows = zip(
            cached.handles, cached.num_computed_tokens, cached.num_scheduled_tokens, strict=True
        )
        for handle, num_computed, num_scheduled in rows:
            require(handle in self.requests, f"{handle} is cached but not held")
            request = self.requests[handle]
            require(request.num_computed_tokens == num_computed, f"{handle} computed tokens differ")
            for group in request.block_ids:
                group.extend(next(block) for _ in range(next(counts)))
            self._schedule(handle, num_scheduled)
        require(next(block, None) is None, "blocks are left over")
        require(next(counts, None) is None, "block counts are left over")

    def _schedule(self, handle: int, count: int) -> None:
        request = self.requests[handle]
        require(handle not in self.scheduled, f"{handle} is scheduled twice")
        end = request.num_computed_tokens + count
        require(count > 0 and end <= len(request.token_ids), f"{handle} runs past its tokens")
        for ids in request.block_ids:
            require(end <= len(ids) * self.block_size, f"{handle} has too few blocks")
            require(0 not in ids, f"{handle} holds the null block")
            require(max(ids) < self.num_blocks, f"{handle} holds a block that does not exist")
            require(len(set(ids)) == len(ids), f"{handle} holds a block twice")
        self.scheduled[handle] = count

    def _write(self) -> None:
        """Writes all requests' new slots, as the forward does before attention reads."""
        writer: dict[tuple[int, int], int] = {}
        for handle, count in self.scheduled.items():
            request = self.requests[handle]
            start = request.num_computed_tokens
            for position in range(start, start + count):
                for group, ids in enumerate(request.block_ids):
                    block = ids[position // self.block_size]
                    other = writer.setdefault((group, block), handle)
                    require(other == handle, f"{handle} and {other} write block {block}")
                    slot = (group, block, position % self.block_size)
                    self.slots[slot] = request.digest_at(position)

    def _read(self, handle: int) -> list[int]:
        """Checks all the keys that a request attends to; samples when all its tokens are there."""
        request = self.requests[handle]
        end = request.num_computed_tokens + self.scheduled[handle]
        for position in range(end):
            for group, ids in enumerate(request.block_ids):
                slot = (group, ids[position // self.block_size], position % self.block_size)
                require(
                    self.slots.get(slot) == request.digest_at(position),
                    f"{request.request_id} reads a slot of another prefix at {position}",
                )
        request.num_computed_tokens = end
        if end < len(request.token_ids):
            return []
        token_id = next_token(request.digest_at(end - 1), self.vocab_size)
        request.token_ids.append(token_id)
        return [token_id]


def require(condition: bool, message: str) -> None:
    """Raises ShadowMismatchError."""
    if not condition:
        raise ShadowMismatchError(message)
