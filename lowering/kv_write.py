"""The chain of ``tcport::kv_write``: Triton, PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcport.device import DeviceProfile
from tcport.errors import NoTileError
from tcport.ir import TileConfig
from tcport.kernels.call import Launcher, WriteCall
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.registry import Answer, register_lowering
from tcport.lowering.spec import WriteSpec
from tcport.tiling import rank_write_tiles


@register_lowering("kv_write", name="triton_write")
def triton_write(spec: WriteSpec, profile: DeviceProfile) -> Answer:
    """One program for a block of rows. Every tile moves the same bytes: behind the best there is no better one."""
    if profile.vendor == "cpu":
        return Verdict.no("Triton has no CPU target")
    try:
        tile = rank_write_tiles(spec, profile).configs[0]
    except NoTileError as error:
        return Verdict.no(error.cause)
    return Candidate("triton_write", "tuned", _triton(tile), tile)


@register_lowering("kv_write", name="torch_write")
def torch_write(spec: WriteSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, compiled by Inductor where the graph is compiled."""
    return Candidate("torch_write", "torch", _run_torch)


def _triton(tile: TileConfig) -> Callable[[WriteCall, Launcher], None]:
    def run(call: WriteCall, launch: Launcher) -> None:
        from tcport.kernels.triton_write import kv_write

        kv_write(call, launch, tile)

    return run


def _run_torch(call: WriteCall, launch: Launcher) -> Any:
    from tcport.kernels import decomposition

    return decomposition.kv_write(call)
