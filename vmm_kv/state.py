"""The states of a KV cache. DESIGN.md has the diagram."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """What a `KVCache` is at the moment, and so which operations it allows."""

    RESERVED = "reserved"
    """Addresses and no memory."""
    BACKED = "backed"
    """Memory for profiling and capture, by a prefix or an alias; no block is usable yet."""
    COMMITTED = "committed"
    """`KVCache.blocks` blocks are usable; it can grow and shrink."""
    FAULTED = "faulted"
    """Undoing a failed operation failed too. Only close is allowed."""
    CLOSED = "closed"
    """Everything is given back."""
