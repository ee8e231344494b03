"""The bugs of ROCm releases that the device model can imitate, by the number that they have there (B1, B2, B4, B13)."""

from __future__ import annotations

import ctypes

import pytest

from vmm_kv._native import DeviceModel

G = 2 << 20
OK, INVALID = 0, 1
READ_WRITE = 3


@pytest.fixture
def model() -> DeviceModel:
    return DeviceModel([16 * G], G)


def reserve(model: DeviceModel, size: int = 8 * G) -> int:
    status, base = model.reserve(size, 0, 0)
    assert status == OK
    return base


def mapped(model: DeviceModel, address: int, size: int = G) -> int:
    status, handle = model.create(0, size)
    assert status == OK
    assert model.map(address, size, 0, handle) == OK
    return handle


def grant(model: DeviceModel, address: int, size: int) -> int:
    return model.set_access(address, size, 0, READ_WRITE)


# B1: sizes are summed from the reservation's first mapping.


def test_b1_access_by_mapping_fails_over_chunks_of_mixed_sizes(model: DeviceModel) -> None:
    base = reserve(model)
    mapped(model, base, 2 * G)
    mapped(model, base + 2 * G, G)
    model.quirk_access_from_first = True
    assert grant(model, base + 2 * G, G) == INVALID, "a correct call"
    assert grant(model, base, 2 * G) == OK
    assert grant(model, base, 3 * G) == OK, "the prefix from the base"
    model.quirk_access_from_first = False
    assert grant(model, base + 2 * G, G) == OK


def test_b1_access_by_mapping_works_over_uniform_chunks(model: DeviceModel) -> None:
    base = reserve(model)
    for i in range(4):
        mapped(model, base + i * G)
    model.quirk_access_from_first = True
    assert [grant(model, base + i * G, G) for i in (3, 1)] == [OK, OK]
    assert grant(model, base + G, 3 * G) == OK
    assert [model.get_access(base + i * G, 0)[1] for i in range(4)] == [0, 3, 3, 3]


def test_b1_still_refuses_what_is_wrong(model: DeviceModel) -> None:
    base = reserve(model)
    mapped(model, base)
    mapped(model, base + 2 * G)
    model.quirk_access_from_first = True
    assert grant(model, base + G, G) == INVALID, "nothing is mapped there"
    assert grant(model, base, 2 * G) == INVALID, "a gap"


# B2: one unmap of several mappings leaves the range in use.


def test_b2_a_joint_unmap_leaves_the_range_busy(model: DeviceModel) -> None:
    model.quirk_joint_unmap_busy = True
    base = reserve(model)
    handles = [mapped(model, base + i * G) for i in range(3)]
    assert model.unmap(base, 3 * G) == OK
    assert all(model.release(handle) == OK for handle in handles)
    assert model.used(0) == 0
    assert model.free_address(base, 8 * G) == INVALID
    assert model.live()["reservations"] == 1


def test_b2_one_unmap_for_each_mapping_leaves_it_free(model: DeviceModel) -> None:
    model.quirk_joint_unmap_busy = True
    base = reserve(model)
    for i in range(3):
        mapped(model, base + i * G)
    assert [model.unmap(base + i * G, G) for i in range(3)] == [OK] * 3
    assert model.free_address(base, 8 * G) == OK


# B4: memory does not return while its addresses stay reserved.


@pytest.mark.parametrize("release_first", [False, True])
def test_b4_memory_returns_with_the_addresses(model: DeviceModel, release_first: bool) -> None:
    model.quirk_memory_with_addresses = True
    base, other = reserve(model), reserve(model)
    handle = mapped(model, base, 4 * G)
    if release_first:
        assert (model.release(handle), model.unmap(base, 4 * G)) == (OK, OK)
    else:
        assert (model.unmap(base, 4 * G), model.release(handle)) == (OK, OK)
    assert model.live()["handles"] == 0
    assert model.mem_info(0) == (OK, 12 * G, 16 * G)
    assert model.free_address(other, 8 * G) == OK
    assert model.used(0) == 4 * G, "these were other addresses"
    assert model.free_address(base, 8 * G) == OK
    assert model.used(0) == 0


def test_b4_reserving_the_same_address_again_brings_it_back(model: DeviceModel) -> None:
    model.quirk_memory_with_addresses = True
    base = reserve(model)
    handle = mapped(model, base)
    assert (model.unmap(base, G), model.release(handle), model.free_address(base, 8 * G)) == (OK, OK, OK)
    assert model.reserve(8 * G, 0, base) == (OK, base)
    assert model.used(0) == 0


def test_b4_memory_that_was_never_mapped_returns_at_once(model: DeviceModel) -> None:
    model.quirk_memory_with_addresses = True
    _, handle = model.create(0, G)
    assert model.release(handle) == OK
    assert model.used(0) == 0


def test_b4_addresses_do_not_remember_the_memory_of_their_predecessor(model: DeviceModel) -> None:
    """Unmapped, its addresses freed and reserved by somebody else, released: nothing holds it."""
    model.quirk_memory_with_addresses = True
    base = reserve(model)
    handle = mapped(model, base)
    assert (model.unmap(base, G), model.free_address(base, 8 * G)) == (OK, OK)
    assert model.reserve(8 * G, 0, base) == (OK, base)
    assert model.release(handle) == OK
    assert model.used(0) == 0


# B13: to a memset a mapping is an object of its own.


def test_b13_a_memset_stays_within_one_mapping(model: DeviceModel) -> None:
    model.poison = True
    base = reserve(model)
    for i in range(2):
        mapped(model, base + i * G)
    assert grant(model, base, 2 * G) == OK
    assert model.zero(base, 2 * G, 0) == OK
    ctypes.memset(base, 1, 2 * G)
    model.quirk_single_memset = True
    assert [model.zero(base, 2 * G, 0), model.zero(base + G - 1, 2, 0)] == [INVALID, INVALID]
    assert ctypes.string_at(base + G - 1, 2) == b"\1\1", "one that is refused has written nothing"
    assert [model.zero(base, G, 0), model.zero(base + G, G, 0), model.zero(base + 5, G - 5, 0)] == [OK] * 3
    assert ctypes.string_at(base + G - 1, 2) == bytes(2)
    assert model.zero(base + 2 * G, G, 0) == INVALID, "nothing is mapped there"
    assert model.zero(base, 0, 0) == OK


# Not a bug of anybody's: what the emulation promises beyond a driver.


def test_a_handle_of_one_model_is_none_of_another(model: DeviceModel) -> None:
    """A stale handle must be an error, and not another model's memory."""
    handles = [model.create(0, G)[1] for _ in range(3)]
    other = DeviceModel([16 * G], G)
    theirs = [other.create(0, G)[1] for _ in range(3)]
    assert len({*handles, *theirs}) == 6
    assert [other.release(handle) for handle in handles] == [INVALID] * 3
    assert (other.used(0), model.used(0)) == (3 * G, 3 * G)
