"""What a forward pass knows of the batch, kept out of the model code's signatures.

Attention layers read it; nothing else does. One compute thread runs forwards, but several workers
may share a process, so the context is per thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from worker.attention.backend import AttentionBackend, KvLayerCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's attention state."""

    backend: AttentionBackend
    kv_caches: list[KvLayerCache]
    """One per layer."""


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the one that attention layers read; not reentrant."""
    _current.context = context
    try:
        yield
    finally:
        _current.context = None


def get_forward_context() -> ForwardContext:
    """The step's context. Errors: RuntimeError outside a forward."""
    if _current.context is None:
        raise RuntimeError("attention was called outside a forward context")
    return _current.context
