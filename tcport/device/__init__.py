"""Device facts: what is in the room, what is in the catalogue, and what the caller says."""

from tcport.device.current import device_profile, load_profile, override_profile, refresh, set_profile
from tcport.device.profile import FACTS, DeviceProfile, Vendor

__all__ = [
    "FACTS",
    "DeviceProfile",
    "Vendor",
    "device_profile",
    "load_profile",
    "override_profile",
    "refresh",
    "set_profile",
]
