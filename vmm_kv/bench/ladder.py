"""The ladders of graphs that the strategies are compared on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vmm_kv.estimate import Descriptor, Mode, capture_order


@dataclass(frozen=True)
class Ladder:
    """The graphs that an engine captures. Sizes rise."""

    name: str
    decode: tuple[int, ...]
    """Batch sizes."""
    prefill: tuple[int, ...] = ()
    """Tokens of a prefill in pieces: all but the attention lies in graphs."""
    images: tuple[int, ...] = ()
    """Patches of the images that the encoder has graphs for. Larger ones are encoded eagerly."""
    largest_image: int = 0
    """Patches; 0: there is no encoder."""
    draft: bool = False
    """A small model proposes a token a step, which the large one checks."""
    quantised: bool = False
    """Keys and values are 8-bit floats."""

    def descriptors(self) -> tuple[Descriptor, ...]:
        """In the order of capture, the largest first within a mode."""
        modes: tuple[tuple[Mode, tuple[int, ...]], ...] = (
            ("encoder", self.images),
            ("piecewise", self.prefill),
            ("full", self.decode),
            ("draft", self.decode if self.draft else ()),
        )
        return capture_order(Descriptor(mode, size) for mode, sizes in modes for size in sizes)


_DECODE = (1, 2, 4, *range(8, 33, 4))
LADDERS = (
    Ladder("decode", _DECODE),
    Ladder("decode + piecewise prefill", _DECODE, prefill=(256, 512, 1024, 1536, 2048)),
    Ladder("with an encoder", _DECODE, images=(64, 128, 256), largest_image=4096),
    Ladder("with a draft model", _DECODE, draft=True),
    Ladder("quantised cache", _DECODE, quantised=True),
)
