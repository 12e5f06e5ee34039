"""What a device is called that was found, where its user has a name for it."""

import pytest

from hetero.errors import ConfigError
from hetero.spec.found_device import FoundDevice
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.units import GIB

A100 = FoundDevice(cuda_name="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0), memory_bytes=40 * GIB)
UNKNOWN = FoundDevice(cuda_name="Abacus [3000]", compute_capability=(9, 9), memory_bytes=12 * GIB)


def test_without_a_name_it_is_what_discovery_says() -> None:
    for found in (A100, UNKNOWN, FoundDevice()):
        assert found.type_called(None, SHIPPED_DEVICES) == found.type_among(SHIPPED_DEVICES)


def test_a_name_of_its_own_describes_what_was_found() -> None:
    named = UNKNOWN.type_called("mine", SHIPPED_DEVICES)
    assert (named.name, named.memory_gib, named.compute_capability) == ("mine", 12, (9, 9))
    assert UNKNOWN.is_a(named)
    assert not A100.is_a(named)
    assert FoundDevice().is_a(FoundDevice().type_called("small-cpu", SHIPPED_DEVICES))


def test_a_name_that_ships_is_that_of_such_a_device() -> None:
    assert A100.type_called("A100-40", SHIPPED_DEVICES) == SHIPPED_DEVICES.of("A100-40")
    with pytest.raises(ConfigError, match=r"^device type V100-16: this is NVIDIA A100-SXM4-40GB, which is none; give"):
        A100.type_called("V100-16", SHIPPED_DEVICES)
    with pytest.raises(ConfigError, match=r"^device type A100-40: this is a processor, which is none"):
        FoundDevice().type_called("A100-40", SHIPPED_DEVICES)
