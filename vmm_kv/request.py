"""What the user asks for when a KV cache is sized."""

from __future__ import annotations

from dataclasses import dataclass

from vmm_kv.sizes import whole


@dataclass(frozen=True)
class Request:
    """Exactly one of the three is given, else `ValueError`. Kept as plain numbers, whatever type they came in."""

    utilization: float | None = None
    """Share of the whole device for everything this process holds: above 0, at most 1."""
    kv_bytes: int | None = None
    """Upper bound on the KV cache alone. Nothing is taken off it."""
    blocks: int | None = None
    """Exact block count."""

    def __post_init__(self) -> None:
        given = [name for name in ("utilization", "kv_bytes", "blocks") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of utilization, kv_bytes, blocks; got {', '.join(given) or 'none'}")
        (name,) = given
        asked = getattr(self, name)
        number = _share(asked) if name == "utilization" else whole(name, asked)
        object.__setattr__(self, name, number)
        if name == "utilization" and not 0 < number <= 1:
            raise ValueError(f"utilization must be above 0 and at most 1, got {asked}")
        if number <= 0:
            raise ValueError(f"{name} must be above 0, got {asked}")


def _share(asked: object) -> float:
    try:
        return float(asked)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"utilization must be a number above 0, at most 1, got {asked!r}") from None
