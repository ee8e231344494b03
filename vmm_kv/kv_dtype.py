"""In what a KV cache keeps its numbers: how many bytes one vector of one token takes, its scales among them.

A scale for a whole tensor or head is a constant of the model and takes no bytes of the cache. What is scaled by token
or by group carries its scales beside its numbers, in the same block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LATENT_TILE, _LATENT_SCALE, _ROPE_ITEM = 128, 4, 2
"""The packed latent: numbers that share a scale, bytes of that scale, bytes of a rotary number, which has 16 bits."""


@dataclass(frozen=True)
class KvDtype:
    """One format. `slot` replaces the arithmetic: bytes of one token in one layer, as an engine packs them."""

    name: str
    bits: int = 0
    scale_bytes: int = 0
    """Bytes of one scale that lies in the cache; 0: none does."""
    scaled: int = 0
    """Numbers that share such a scale; 0: all of one vector."""
    packed_latent: bool = False
    """Only for latent attention: the latent in 8 bits with a scale for each 128 numbers, the rotary part in 16."""
    slot: int | None = None

    def vector_bytes(self, elements: int) -> int:
        """Bytes of one vector: the key, or the value, of one head and one token."""
        scales = -(-elements // self.scaled) if self.scaled else 1
        return -(-elements * self.bits // 8) + scales * self.scale_bytes

    def latent_bytes(self, rank: int, rope: int) -> int:
        """Bytes of one token's latent vector of `rank` numbers and its rotary key of `rope`, which are kept once."""
        if not self.packed_latent:
            return self.vector_bytes(rank + rope)
        return rank + -(-rank // _LATENT_TILE) * _LATENT_SCALE + rope * _ROPE_ITEM


_PLAIN = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8}
_SCALED = (
    KvDtype("fp8_per_token_head", 8, 4),
    KvDtype("int8_per_token_head", 8, 4),
    KvDtype("int4_per_token_head", 4, 4),
    KvDtype("nvfp4", 4, 1, 16),
    KvDtype("fp8_ds_mla", 8, packed_latent=True),
)
KV_DTYPES = {**{name: KvDtype(name, bits) for name, bits in _PLAIN.items()}, **{dtype.name: dtype for dtype in _SCALED}}
"""By name. `fp8` and `int8` have constant scales."""
_ALIASES = {
    "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "fp4_e2m1": "nvfp4",
}  # fmt: skip


def kv_dtype(name: str) -> KvDtype:
    """The format of that name; `"584B"` is an engine's packed slot: bytes of one token in one layer on one rank.

    `ValueError` for what is neither, with the names there are.
    """
    plain = name.removeprefix("torch.")
    if match := re.fullmatch(r"(\d{1,9})B", plain):
        if not int(match[1]):
            raise ValueError("a slot of a KV cache takes at least 1 byte, not 0B")
        return KvDtype(plain, slot=int(match[1]))
    found = KV_DTYPES.get(_ALIASES.get(plain, plain))
    if found is None:
        known = ", ".join([*KV_DTYPES, *_ALIASES])
        raise ValueError(f"{name[:50]!r} is no KV dtype: one of {known}, or the bytes of a packed slot such as 584B")
    return found


def number_bytes(name: str) -> int:
    """Bytes of one number of a model's own dtype: 4 or 2. `ValueError` for what states cannot be kept in."""
    dtype = kv_dtype(name)
    if dtype.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"{name[:50]!r}: float32, float16 or bfloat16 is expected")
    return dtype.bits // 8
