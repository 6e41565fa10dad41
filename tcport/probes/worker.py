"""The process that runs a group of probes: ``python -m tcport.probes.worker INDEX GROUP``.

A process of its own: a kernel that faults takes the device context with it. One JSON line per finished probe, so that
what was measured before a fault, or before time ran out, is kept.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable

import torch

from tcport.probes import CAPABILITIES
from tcport.probes.self_tests import self_tests


def main(index: int, group: str) -> None:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    for name, run in _probes(device, group).items():
        try:
            answer = {"name": name, "ok": True, "detail": run()}
        except Exception as error:  # noqa: BLE001 - whatever it raises is what the probe found
            text = str(error).strip().splitlines()
            answer = {"name": name, "ok": False, "detail": f"{type(error).__name__}: {text[0] if text else ''}"}
        print(f"\n{json.dumps(answer)}", flush=True)  # a line of its own, whatever a compiler printed before


def _probes(device: torch.device, group: str) -> dict[str, Callable[[], str]]:
    if group != CAPABILITIES:
        return self_tests(device, group)
    from tcport.probes import capabilities  # it imports Triton

    return {name: functools.partial(run, device) for name, run in capabilities.CAPABILITIES.items()}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
