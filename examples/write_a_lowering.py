"""A new operator, a Triton kernel for it, and its fallback: ``python examples/write_a_lowering.py``.

The operator ``example::squared_relu`` is written with ``torch.library``, as for any use with ``torch.compile``. Its
lowering offers two candidates: a Triton kernel on GPUs, and everywhere PyTorch operations that Inductor fuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import tcport
from tcport.device import DeviceProfile
from tcport.lowering.candidate import Candidate
from tcport.lowering.foreign import ForeignCall, ForeignSpec
from tcport.testing import check_lowering, lower_on


@torch.library.custom_op("example::squared_relu", mutates_args=())
def squared_relu(x: Tensor, scale: float) -> Tensor:
    """The operator's meaning: what every candidate is compared with."""
    return torch.relu(x).square() * scale


@squared_relu.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def samples() -> Iterator[tuple[Any, ...]]:
    yield torch.linspace(-2, 2, 1000), 0.5
    yield torch.linspace(-2, 2, 30, dtype=torch.float16).view(5, 6), 3.0


def in_torch(call: ForeignCall, launch: Any) -> Tensor:
    x, scale = call.args
    return (torch.relu(x).square() * scale).contiguous()


def in_triton(call: ForeignCall, launch: Any) -> Tensor:
    import triton  # only where a kernel is wanted: importing this file must not need Triton

    from squared_relu_kernel import squared_relu_kernel

    x, scale = call.args
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    launch(squared_relu_kernel)[grid](x, out, scale, x.numel(), BLOCK=1024)
    return out


@tcport.register_lowering("example::squared_relu", inputs=samples, tolerance=(1e-3, 1e-3))
def fused_squared_relu(spec: ForeignSpec, profile: DeviceProfile) -> list[Candidate]:
    """Kernels for one node, best first; ``spec`` has the shapes, strides and dtypes of its arguments."""
    torch_link = Candidate("fused_squared_relu", "torch", in_torch)
    if profile.vendor == "cpu":
        return [torch_link]
    return [Candidate("fused_squared_relu", "tuned", in_triton, why="one read and one write"), torch_link]


def model(x: Tensor) -> Tensor:
    return squared_relu(x + 1, 0.5) * 2


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(64, 64, device=device)
    report = tcport.explain(model, x)
    print(report)
    print("compared with the operator:", check_lowering("example::squared_relu", "fused_squared_relu", device=device))
    from tcport.device.catalog import catalogue_profile

    for node in lower_on(catalogue_profile("h200"), model, x):
        print(f"on an H200: {node.kernel} [{node.tier}], then {', '.join(node.chain[1:])}")


if __name__ == "__main__":
    main()
