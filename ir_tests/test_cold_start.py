"""A cold start compiles each kernel that it needs, once: what the compile check built is what the first call runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tcport.bench.first_call import compiled_files, in_a_process
from tcport.device import catalogue_profile
from tcport.kernels.call import AttentionCall
from tcport.kernels.offline import compile_ahead, record
from tcport.kernels.target import targeting
from tcport.kernels.triton_decode import paged_decode
from tcport.lowering.spec import attention_spec, opened
from tcport.tiling import rank_tiles
from tcport.tiling.footprint import measure
from tcport.tiling.workers import one_worker

H200, A100 = catalogue_profile("h200"), catalogue_profile("a100")
SM_90 = GPUTarget("cuda", 90, 32)


def batch(size: int = 8, pages: int = 128) -> AttentionCall:
    """A decode batch of 16 query heads over 4 KV heads of 64; nothing reads its values."""
    cache = torch.empty(size * pages, 16, 4, 64, dtype=torch.float16)
    ints = torch.zeros(size, pages, dtype=torch.int32)
    return AttentionCall.of(torch.empty(size, 16, 64, dtype=torch.float16), cache, cache.clone(), ints, ints[:, 0])


def test_the_first_call_finds_what_the_compile_check_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    call = batch()
    spec = opened(attention_spec(call))  # as an eager call asks: sizes are left open
    tile = rank_tiles(spec, H200).configs[0]
    (checked,) = measure(spec, [tile], H200, cache=tmp_path / "footprints")
    assert checked.error is None
    built = compiled_files(tmp_path)
    assert sorted(Path(file).name for file in built) == ["combine_kernel.cubin", "paged_attention_kernel.cubin"]
    with targeting(SM_90):
        for launch in record(paged_decode, call, tile):
            compile_ahead(launch, SM_90)  # as the JIT does at a call
    assert compiled_files(tmp_path) == built


def test_one_compiler_process_serves_several_devices(tmp_path: Path) -> None:
    """Triton's JIT keeps the target of the first compile for a device; another target is another device to it."""
    spec = opened(attention_spec(batch()))
    tiles = rank_tiles(spec, A100).configs[:1]
    with one_worker():
        shared = [measure(spec, tiles, device, cache=tmp_path / "shared")[0] for device in (H200, A100)]
    alone = [measure(spec, tiles, device, cache=tmp_path / "alone")[0] for device in (H200, A100)]
    assert [compiled.error for compiled in alone] == [None, None]
    assert alone[0] != alone[1]
    assert shared == alone


@pytest.mark.gpu
def test_the_operators_compile_the_kernels_they_need_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process with empty caches, the compile check on; self-tests, which run other problems, are left out."""
    monkeypatch.setenv("TCPORT_PROBES", "0")
    monkeypatch.setenv("TCPORT_COMPILE_CHECK", "1")
    in_a_process("cuda", "operators", "cold", tmp_path, None)
    cubins = sorted(Path(file).name for file in compiled_files(tmp_path) if file.endswith(".cubin"))
    assert cubins == ["combine_kernel.cubin", "kv_write_kernel.cubin", "paged_attention_kernel.cubin"]
