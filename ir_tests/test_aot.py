"""AOTInductor: a package of a model that calls tcport's operators runs the C++ kernels, in a process without tcport."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tcport
from tcport.aot import kernel_library, lower_exported
from tcport.kernels import reference

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4

RUN = """
import sys, torch
library, package, folder = sys.argv[1:]
torch.ops.load_library(library)
compiled = torch._inductor.aoti_load_package(package)
calls = torch.load(f"{folder}/inputs.pt")
torch.save([(compiled(*inputs), *inputs[1:3]) for inputs in calls], f"{folder}/outputs.pt")
assert not any(name.split(".")[0] == "tcport" for name in sys.modules)
"""


class Attention(nn.Module):
    """One layer: new keys and values go into their slots, and one token per sequence attends."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(32, (HEADS + 2 * KV_HEADS) * DIM, bias=False)

    def forward(
        self, x: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor
    ) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, DIM))
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        tcport.kv_write(key, value, k_cache, v_cache, slots)
        out = tcport.paged_attention(query, k_cache, v_cache, table, lens, window=6)
        assert isinstance(out, Tensor)
        return out * 2


def arguments(lens: list[int]) -> tuple[Tensor, ...]:
    """Sequences of up to 8 keys on two pages each, the newest of which is to be written."""
    random = torch.Generator().manual_seed(len(lens))
    k_cache, v_cache = (torch.randn(8, KV_HEADS, PAGE, DIM, generator=random).transpose(1, 2) for _ in range(2))
    table = torch.randperm(8, generator=random)[: 2 * len(lens)].view(-1, 2)
    last = torch.tensor(lens) - 1
    slots = table[torch.arange(len(lens)), last // PAGE] * PAGE + last % PAGE
    return torch.randn(len(lens), 32, generator=random), k_cache, v_cache, table, last + 1, slots


def expected(model: Attention, lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    x, k_cache, v_cache, table, lengths, slots = arguments(lens)
    heads = model.query_key_value(x).unflatten(-1, (-1, DIM))
    query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    reference.kv_write(key, value, k_cache, v_cache, slots)
    out, _ = reference.paged_attention(query, k_cache, v_cache, table, lengths, window=6)
    return out * 2, k_cache, v_cache


@pytest.fixture(scope="module")
def model() -> Attention:
    torch.manual_seed(0)
    return Attention().requires_grad_(False).eval()


def exported(model: Attention) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2, max=4)
    shapes = ({0: batch}, None, None, {0: batch}, {0: batch}, {0: batch})
    return torch.export.export(model, arguments([3, 8]), dynamic_shapes=shapes)


def check(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for result, reference_result in zip(got, wanted, strict=True):
        torch.testing.assert_close(result, reference_result)


def test_the_exported_graph_calls_the_kernels_and_is_right(model: Attention) -> None:
    program = exported(model)
    assert sorted(lower_exported(program).values()) == ["cpp_attention", "cpp_write"]
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"tcport_cpu.paged_attention.default", "tcport_cpu.kv_write.default"} <= called
    assert not any(name.startswith("tcport.") for name in called)
    inputs = arguments([8, 1, 5])
    check((program.module()(*inputs), *inputs[1:3]), expected(model, [8, 1, 5]))


def test_what_has_no_kernel_stays_the_operator(model: Attention) -> None:
    double = Attention().double().requires_grad_(False)
    inputs = tuple(t.double() if t.is_floating_point() else t for t in arguments([3, 8]))
    program = torch.export.export(double, inputs)
    assert all("fp64: the C++ kernels" in why for why in lower_exported(program).values())
    assert "tcport.paged_attention.default" in {str(node.target) for node in program.graph.nodes}


def test_a_package_needs_no_python(model: Attention, tmp_path: Path) -> None:
    program = exported(model)
    lower_exported(program)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    batches = [3, 8], [8, 1, 5]
    torch.save([arguments(lens) for lens in batches], tmp_path / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-c", RUN, kernel_library(), package, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for lens, got in zip(batches, torch.load(tmp_path / "outputs.pt"), strict=True):
        check(got, expected(model, lens))


def test_a_package_that_was_not_lowered_calls_the_operators(model: Attention, tmp_path: Path) -> None:
    package = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(tmp_path / "model.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    inputs = arguments([4, 7, 2])
    check((compiled(*inputs), *inputs[1:3]), expected(model, [4, 7, 2]))
