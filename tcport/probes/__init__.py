"""What a device really does, measured once: capabilities no datasheet settles, and whether kernels are right."""

from tcport.probes.results import CAPABILITIES, FAMILIES, Outcome, is_present, probe, trusted

__all__ = ["CAPABILITIES", "FAMILIES", "Outcome", "is_present", "probe", "trusted"]
