"""One walk through the seam with whatever binding is installed: `make test-bindings` runs it with older ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from vmm_kv.driver import Driver
from vmm_kv.driver.cuda import CudaDriver
from vmm_kv.driver.hip import HipDriver
from vmm_kv.testing import EmulatedModel, load_cuda, load_hip

G = 2 << 20


@pytest.mark.parametrize(
    ("load", "make"),
    [pytest.param(load_cuda, CudaDriver, id="cuda"), pytest.param(load_hip, HipDriver, id="hip")],
)
def test_a_walk_through_the_seam(load: Callable[..., EmulatedModel], make: Callable[..., Driver]) -> None:
    model = load(devices=2, budget=16 * G, granule=G)
    driver = make(1, handle_types=("posix_fd", "none"))
    assert driver.granule == G
    with driver.scope():
        base = driver.reserve(8 * G)
        handles = [driver.create(G) for _ in range(4)]
        for i, handle in enumerate(handles):
            driver.map(base + i * G, G, handle)
        driver.set_access(base, 4 * G)
        assert driver.get_access(base) == 3
        ctypes.memset(base, 1, 4 * G)
        driver.zero([(base + 5, base + 9)])
        assert ctypes.string_at(base + 4, 6) == b"\1\0\0\0\0\1"
        assert driver.mem_info() == (12 * G, 16 * G)
        assert not driver.capturing()
        driver.synchronize()
        for i, handle in enumerate(handles):
            driver.unmap(base + i * G, G)
            driver.release(handle)
        driver.free_address(base, 8 * G)
    assert model.live() == {"handles": 0, "mappings": 0, "reservations": 0}
    assert (model.used(1), model.calls_on(0)) == (0, 0)
