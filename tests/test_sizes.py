"""Sizes as people write them."""

from __future__ import annotations

import pytest

from vmm_kv.sizes import parse_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("1.5KiB", 1536), ("7", 7), ("0.1GiB", (1 << 30) // 10), (" 2 MiB", 2 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "0.0001B", "1e9", "-1GiB", "1000TiB", "GiB", "1.GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("3KiB", 3072), ("1.5GiB", 3 << 29), (" 2 MiB ", 2 * MIB), ("1TiB", 1 << 40)]
)
def test_sizes_of_devices(text: str, size: int) -> None:
    assert parse_bytes(text) == size
