"""Device facts: what is in the room, what is in the catalogue, and what the caller says."""

from tcport.device.catalog import catalogue, catalogue_profile
from tcport.device.current import (
    device_profile,
    load_profile,
    override_profile,
    profile_state,
    refresh,
    refreshes,
    set_profile,
)
from tcport.device.live import watch
from tcport.device.profile import FACTS, DeviceProfile, Vendor

__all__ = [
    "FACTS",
    "DeviceProfile",
    "Vendor",
    "catalogue",
    "catalogue_profile",
    "device_profile",
    "load_profile",
    "override_profile",
    "profile_state",
    "refresh",
    "refreshes",
    "set_profile",
    "watch",
]
