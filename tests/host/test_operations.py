"""Nests of tensors as operations take and give them."""

from __future__ import annotations

from collections import namedtuple

import torch

from vmm_kv.host.operations import mapped, tensors

A, B, C = (torch.full((1,), float(value)) for value in range(3))


def test_tensors_are_found_in_any_nest_in_order() -> None:
    nest = (A, [1, None, (B, {"more": [C]})], "text")
    assert [int(tensor) for tensor in tensors(nest)] == [0, 1, 2]
    assert list(tensors(A)) == [A] and list(tensors({"x": B})) == [B] and not list(tensors(3.0))


def test_a_nest_is_mapped_into_the_same_nest() -> None:
    pair = namedtuple("pair", "left right")
    nest = (A, [1, None, pair(B, {"more": [C]})], "text")
    same = mapped(lambda tensor: tensor + 10, nest)
    assert [int(tensor) for tensor in tensors(same)] == [10, 11, 12]
    assert isinstance(same, tuple) and isinstance(same[1], list) and isinstance(same[1][2], pair)
    assert same[1][:2] == [1, None] and same[2] == "text"
    assert int(A) == 0


def test_results_with_named_fields_stay_such() -> None:
    found = torch.max(torch.tensor([[1.0, 3.0]]), 1)
    changed = mapped(lambda tensor: tensor * 2, found)
    assert type(changed) is type(found)
    assert (changed.values.item(), changed.indices.item()) == (6.0, 2)
