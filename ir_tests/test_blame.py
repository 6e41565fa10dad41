"""Which kernel of which node a failure of compiled code belongs to."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.codecache import LambdaFuture

from tcport._inductor.blame import failed_call, failed_kernel, naming
from tcport.emission import Emitted
from tcport.lowering.candidate import Candidate


def test_a_generated_kernel_belongs_to_the_node_with_its_constants() -> None:
    write, attention = (Candidate(name, "tuned", lambda call, launch: None) for name in ("write", "attention"))
    node = Emitted("node", None, None)  # type: ignore[arg-type]
    node.launches = [
        (write, "store", {"num_warps": 4}),
        (attention, "attend", {"BLOCK_N": 64, "num_warps": 4, "GROUP": 3}),
        (attention, "combine", {"BLOCK_S": 16}),
    ]
    source = "configs=[{'num_warps': 4}], triton_meta={'constants': {'BLOCK_N': %d}}"
    assert node.makers("attend", source % 64) == [attention]
    assert node.makers("attend_1", source % 64) == [attention]
    assert node.makers("attend", source % 32) == []
    assert node.makers("attend_late", source % 64) == []
    assert node.makers("combine", source % 32) == [attention]
    assert node.makers("store_0", source % 32) == [write]


def test_the_kernel_behind_a_wrapped_error_is_found() -> None:
    inner = RuntimeError("An exception occurred in a subprocess")
    inner.tcport_kernel = ("attend", "source")  # type: ignore[attr-defined]
    wrapped = ValueError("wrapped")
    wrapped.__cause__ = inner
    assert failed_kernel(wrapped) == ("attend", "source")
    assert failed_kernel(ValueError("no kernel")) is None


def test_an_operator_s_call_is_told_by_its_name_and_by_what_it_is_given() -> None:
    node = Emitted("node", None, None)  # type: ignore[arg-type]
    kernels = [Candidate(name, "blob", print) for name in ("narrow", "wide", "write")]
    for kernel, name, given in zip(kernels, ("ns.attend", "ns.attend", "ns.write"), (0.25, 0.125, "x"), strict=True):
        node._note_call(kernel, f"{name}.default", (torch.ones(1), given, 7, None))
    narrow, wide, write = kernels
    line = "buf1 = torch.ops.ns.attend.default(buf0, 0.125, 7)"
    assert node.callers(line, exactly=True) == [wide]
    assert node.callers(line, exactly=False) == [narrow, wide]
    assert node.callers("torch.ops.ns.write.default(buf0, 'x')", exactly=True) == [write]
    assert node.callers("torch.ops.ns.attend_more.default(buf0, 0.125)", exactly=False) == []
    assert failed_call(ValueError("raised by no generated code")) is None


def test_a_compile_that_fails_now_or_in_a_worker_names_its_kernel() -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("ptxas fatal")

    for compile_triton in (broken, lambda *args: LambdaFuture(broken)):
        named = naming(compile_triton)
        with pytest.raises(RuntimeError, match="ptxas fatal") as caught:
            named(None, "attend", "its source").result()
        assert failed_kernel(caught.value) == ("attend", "its source")
