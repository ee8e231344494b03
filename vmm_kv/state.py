"""The states of a KV cache. DESIGN.md has the diagram."""

from __future__ import annotations

import enum


class State(enum.Enum):
    RESERVED = "reserved"
    BACKED = "backed"
    COMMITTED = "committed"
    FAULTED = "faulted"
    CLOSED = "closed"
