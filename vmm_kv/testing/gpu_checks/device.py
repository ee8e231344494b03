"""What the device is, and how handles can be made on it."""

from __future__ import annotations

from dataclasses import asdict

from vmm_kv import gpu_drivers
from vmm_kv.driver.handle_types import HANDLE_TYPES
from vmm_kv.errors import UnsupportedError
from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import GIB, Rig


@check("device", "C1 C6 G5")
def what_it_is(rig: Rig) -> None:
    """The device's properties, granule and quirks."""
    properties, driver = rig.driver.properties(), rig.driver
    with driver.scope():
        free, total = driver.mem_info()
    quirks = [name for name, on in asdict(driver.quirks).items() if on]
    rig.findings.details.update(
        name=properties.name,
        integrated=properties.integrated,
        multi_instance=properties.multi_instance,
        total=total,
        attribute_total=properties.total,
        free=free,
        granule=driver.granule,
        rdma=driver.memory_traits.rdma,
        quirks=quirks,
    )
    rig.say(f"{properties.name}, {total / GIB:.2f} GiB, granule {driver.granule}, rdma {driver.memory_traits.rdma}")
    rig.say(f"quirks {', '.join(quirks) or 'none'}")
    rig.expect("granule", driver.granule, 2 << 20)


@check("device.handle_types", "C5")
def handle_types(rig: Rig) -> None:
    """Which types of handle can be made, and with which granule."""
    for handle_type in HANDLE_TYPES:
        try:
            driver = gpu_drivers.open_driver(rig.driver.kind, rig.driver.index, handle_types=(handle_type,))
        except UnsupportedError as error:
            rig.findings.details[handle_type] = str(error)
            rig.say(f"{handle_type}: refused")
            rig.require(handle_type != "none", str(error))
        else:
            rig.findings.details[handle_type] = f"granule {driver.granule}"
            rig.say(f"{handle_type}: works, granule {driver.granule}")
