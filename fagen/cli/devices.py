"""Which GPU a command works for: what --arch and --device say, and what is present."""

from __future__ import annotations

from contextlib import suppress

from fagen.cli.options import integers
from fagen.device import Device, architecture, typical_device
from fagen.errors import ArgumentError, DeviceError, UnsupportedError
from fagen.run import driver


def present_devices() -> dict[int, Device]:
    """The CUDA devices here that fagen supports, by number; none without a driver."""
    found: dict[int, Device] = {}
    with suppress(DeviceError):
        for index in range(driver.device_count()):
            with suppress(UnsupportedError):  # an old card beside others
                found[index] = driver.query_device(index)
    return found


def device_for(arch: str | None, index: int | None = None) -> tuple[Device, int | None]:
    """The device to work for, and its CUDA number; None for a typical one that is not present.

    Raises:
        ArgumentError: for an unknown architecture, or a device that is not there.
        DeviceError: if there is neither a device nor an `arch`.
    """
    wanted = None if arch is None else architecture(arch)
    present = present_devices()
    if index is not None and index not in present:
        allowed = ", ".join(map(str, present)) or "none"
        raise ArgumentError(f"--device {index}: the CUDA devices that fagen knows here: {allowed}")
    for number, device in present.items():
        if (index is None or number == index) and (wanted is None or device.arch == wanted):
            return device, number
    if wanted is None:
        raise DeviceError("no CUDA device here: name an architecture, such as --arch sm90")
    return typical_device(wanted), None


def devices_for(arch: str | None, chosen: str | None) -> tuple[Device, list[int]]:
    """The device to tune for, and the CUDA numbers of those to measure on; none to predict.

    Args:
        chosen: numbers such as "0,1", or "all" for every equal one; the first that fits if None.

    Raises:
        ArgumentError, DeviceError: as `device_for`.
    """
    if chosen is None or chosen == "all":
        device, index = device_for(arch)
        if index is None or chosen is None:
            return device, [] if index is None else [index]
        present = present_devices()
        return device, [number for number, other in present.items() if other.key == device.key]
    numbers = list(dict.fromkeys(integers(chosen, "--device", least=0, example="0,1")))
    found = [device_for(arch, number) for number in numbers]
    for number, (device, index) in zip(numbers, found, strict=True):
        if index is None:
            raise ArgumentError(
                f"--device {number}: not an {device.arch.name} card; name another one"
            )
    return found[0][0], numbers
