"""``pw.make_virtual_device_set``: devices as the paper's programs ask for them.

Rule for maintainers: the set is :class:`.devices.VirtualDeviceSet`; here is only
of which lab it is.

Paper: section 3 (virtual device sets).
"""

from __future__ import annotations

from pathways_lab.client.lab.devices import VirtualDeviceSet
from pathways_lab.client.lab.lab import Lab, current_or_new
from pathways_lab.client.session import failures


def make_virtual_device_set(lab: Lab | None = None) -> VirtualDeviceSet:
    """A set to which slices of virtual devices are added: of the kernel's lab, or of a first one.

    Raises PathwaysError for what is no lab, and where the kernel's lab is gone.
    """
    if lab is not None and not callable(getattr(lab, "slice", None)):
        raise failures.failure(
            "refused",
            f"lab={lab!r:.60} has no devices to make a set of",
            "pw.make_virtual_device_set().add_slice(tpu_devices=4), or with a lab as its argument",
        )
    return VirtualDeviceSet(current_or_new() if lab is None else lab)
