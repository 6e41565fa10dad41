"""The compile check: real compilers for devices that are not in the room, and what it does when they fail."""

import json
import shutil
from pathlib import Path

import pytest
from test_tiling_rank import decode_spec

from tcport.device import catalogue_profile
from tcport.errors import OutOfResourcesError
from tcport.ir import TileConfig
from tcport.tiling import TileLayoutOptimizer, fit, footprint, rank_tiles, sources
from tcport.tiling.fit import step_down
from tcport.tiling.footprint import Compiled, Footprint, compile_target, measure
from tcport.tiling.optimizer import register_estimate

GQA = {"num_q_heads": 64, "num_kv_heads": 8}
CASES = {
    # device: (limit of shared memory, spec)
    "mi300x": (64 * 1024, {"dim_qk": 256, "dim_v": 256, "page": 1056}),
    "rtx4090": (99 * 1024, {"dim_qk": 512, "dim_v": 512, "page": 64}),
    "a100": (163 * 1024, {"dim_qk": 320, "dim_v": 320, "page": 256, "kv_dtype": "float8_e4m3fn", "kv_scales": True}),
    "h200": (227 * 1024, {"dim_qk": 192, "dim_v": 128, "page": 16, "context": 65536}),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("footprints")


@pytest.mark.parametrize("device", CASES)
def test_the_chosen_kernel_compiles_below_the_limit(device, cache):
    limit, changes = CASES[device]
    spec, profile = decode_spec(**GQA, **changes), catalogue_profile(device)
    accepted = fit.fit(spec, profile, rank_tiles(spec, profile), cache=cache)
    attention = accepted.compiled.footprints[0]
    assert attention.kernel == "paged_attention_kernel"
    assert 0 < attention.shared <= limit
    assert attention.threads <= 1024
    assert 0 < attention.registers <= (512 if device == "mi300x" else 255)
    assert attention.spill == 0
    # The constraint never promises less than the compiler takes, nor twice as much.
    optimizer = TileLayoutOptimizer(spec, profile)
    promised = float(optimizer.explain(accepted.config)[0].split(" bytes")[0].split("= ")[-1])
    assert attention.shared <= promised <= 2 * attention.shared + 1024


FP32 = {"dtype": "float32", "kv_dtype": "float32"}
# Bytes that triton 3.9 allocated: device, spec, (block_m, block_n, warps, stages), bytes.
COMPILED = [
    ("h200", {}, (16, 64, 2, 1), 22528),
    ("h200", {}, (16, 64, 2, 2), 38912),
    ("h200", {}, (16, 64, 2, 3), 71680),
    ("h200", {}, (16, 64, 2, 4), 104448),
    ("h200", {}, (16, 32, 1, 3), 37120),
    ("h200", {}, (16, 128, 4, 3), 139264),
    ("h200", {"kv_dtype": "float8_e4m3fn"}, (16, 64, 2, 3), 38912),
    ("a100", {"kv_dtype": "int8"}, (16, 64, 4, 2), 22528),
    ("h200", {"dim_qk": 80, "dim_v": 80}, (16, 64, 2, 3), 57856),
    ("h200", {"dim_qk": 192}, (16, 64, 2, 3), 90112),
    ("a100", {"dim_qk": 256, "dim_v": 256}, (16, 32, 4, 2), 41984),
    ("a100", {"dim_qk": 512, "dim_v": 512}, (16, 32, 4, 2), 82944),
    ("a100", {"dim_qk": 512, "dim_v": 512}, (16, 16, 4, 1), 33280),
    ("h200", {"dtype": "float32", "kv_dtype": "float32"}, (16, 64, 2, 2), 77888),
    ("t4", {"dtype": "float16", "kv_dtype": "float16"}, (16, 32, 4, 1), 24576),
    ("h200", {"tokens": 64}, (128, 64, 8, 3), 131072),
    ("h200", {"tokens": 64}, (64, 64, 4, 2), 81920),
    ("h200", {"tokens": 64, "kv_dtype": "float8_e4m3fn"}, (128, 64, 8, 2), 65536),
    ("h200", {"tokens": 64, "mask": True}, (128, 64, 8, 2), 131072),
    # fp32 with a scale per token, triton 3.6: what an H200 refused to launch.
    ("h200", {**FP32, "tokens": 15, "dim_qk": 16, "dim_v": 80, "kv_scales": True}, (16, 128, 8, 4), 233472),
    ("a100", {"tokens": 64}, (128, 64, 4, 2), 65536),
    ("a100", {"tokens": 64}, (64, 64, 4, 3), 90112),
    ("mi300x", {}, (16, 64, 4, 1), 16384),
    ("mi300x", {}, (16, 64, 4, 3), 65536),
    ("mi300x", {"kv_dtype": "float8_e4m3fn"}, (16, 64, 4, 2), 24576),
    ("mi300x", {"tokens": 64}, (64, 64, 4, 2), 40960),
    ("rx7900xtx", {}, (16, 32, 4, 2), 16384),
    ("rx7900xtx", {"tokens": 64}, (64, 32, 8, 1), 16384),
]


@pytest.mark.parametrize(("device", "changes", "tile", "compiled"), COMPILED)
def test_the_constraint_covers_what_compilers_allocate(device, changes, tile, compiled):
    optimizer = TileLayoutOptimizer(decode_spec(**changes), catalogue_profile(device))
    line = optimizer.explain(TileConfig(*tile))[0]
    promised = float(line.split(" bytes")[0].split("= ")[-1])
    assert compiled <= promised <= 1.5 * compiled + 1024


def test_the_second_check_compiles_nothing(cache, monkeypatch):
    spec, profile = decode_spec(), catalogue_profile("h200")
    config = TileConfig(16, 32, 1, 3)
    first = measure(spec, [config], profile, cache=cache)

    def forbidden(requests):
        assert requests == []
        return []

    monkeypatch.setattr(footprint, "answers", forbidden)
    assert measure(decode_spec(batch=3, context=99), [config], profile, cache=cache) == first
    # Two 32-key buffers of K and V, 16 query rows, and a little scratch: 36864 bytes and less than 1 KiB.
    assert 36864 <= first[0].footprints[0].shared < 36864 + 1024


def test_what_is_kept_goes_stale_with_the_files_that_a_kernel_imports_and_with_no_other(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "kernel_a": "from helper_a import inner",
        "helper_a": "def inner():\n    import helper_b",
        "helper_b": "import json",
        "kernel_b": "import helper_b",
    }

    def keys():
        sources.sources_of.cache_clear()
        return {name: footprint._key({"entry": f"{name}:run"}) for name in ("kernel_a", "kernel_b")}

    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    first = keys()
    stale = {
        "kernel_a": {"kernel_a"},
        "helper_a": {"kernel_a"},
        "helper_b": {"kernel_a", "kernel_b"},
        "kernel_b": {"kernel_b"},
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text + "\n# other words")
        assert {kernel for kernel, key in keys().items() if key != first[kernel]} == stale[name]
        (tmp_path / f"{name}.py").write_text(text)
    assert keys() == first


def test_what_is_kept_goes_stale_with_what_compiles_it(tmp_path, monkeypatch):
    """The process that compiles, the call it makes up, and what a kernel has from outside the folder of kernels."""
    package = tmp_path / "tcport"
    shutil.copytree(Path(sources.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "_PACKAGE", package)
    monkeypatch.setattr(sources, "_COMPILES", package / "tiling" / "compile_worker.py")
    for used, file in [
        (True, "tiling/compile_worker.py"),
        (True, "tiling/example.py"),
        (True, "kernels/offline.py"),
        (True, "ir.py"),
        (False, "kernels/reference.py"),
        (False, "tiling/cost.py"),
        (False, "cli.py"),
    ]:
        sources.sources_of.cache_clear()
        before = sources.sources_of("tcport.kernels.triton_decode")
        with (package / file).open("a") as text:
            text.write("# other words\n")
        sources.sources_of.cache_clear()
        assert (sources.sources_of("tcport.kernels.triton_decode") != before) == used, file


def test_a_compiler_that_aborts_costs_its_own_tile_only(cache):
    spec, profile, tiles = decode_spec(), catalogue_profile("h200"), [TileConfig(16, n, 1, 3) for n in (32, 16)]
    wide, narrow = measure(spec, tiles, profile, "broken_kernels:aborts_on_wide_tiles", cache)
    assert "ended with code -6" in wide.error
    assert narrow == Compiled()
    raised = measure(spec, tiles, profile, "broken_kernels:raises", cache)
    assert [result.error for result in raised] == ["RuntimeError: no such instruction"] * 2


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        ("CompilationError: at 3:4", True),
        ("RuntimeError: PassManager::run failed", True),
        ("RuntimeError: Cannot find ptxas", False),
        ("PermissionError: [Errno 13] Permission denied: 'ptxas'", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("the compiler's process ended with code -9: no message", False),
    ],
)
def test_what_may_pass_by_itself_is_asked_again(error: str, kept: bool, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        footprint, "answers", lambda requests: asked.extend(requests) or [{"error": error}] * len(requests)
    )
    for _ in range(2):
        (compiled,) = measure(decode_spec(), [TileConfig(16, 32, 1, 3)], catalogue_profile("h200"), cache=tmp_path)
        assert compiled.error == error
    assert len(asked) == (1 if kept else 2)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        "3",
        "{}",
        '{"launches": 3}',
        '{"launches": [{"kernel": "k"}]}',
        '{"launches": [{"kernel": "k", "shared": "x", "registers": 1, "spill": 0, "threads": 32}]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_answer_in_the_cache_is_asked_again(damaged: str, tmp_path, monkeypatch):
    launch = {"kernel": "k", "shared": 7, "registers": 8, "spill": 0, "threads": 32}
    monkeypatch.setattr(footprint, "answers", lambda requests: [{"launches": [launch]}] * len(requests))
    args = (decode_spec(), [TileConfig(16, 32, 1, 3)], catalogue_profile("h200"))
    right = measure(*args, cache=tmp_path)
    assert right[0].footprints[0].shared == 7
    (path,) = tmp_path.iterdir()
    path.write_text(damaged)
    assert measure(*args, cache=tmp_path) == right
    assert json.loads(path.read_text()) == {"launches": [launch]}


def test_no_compiler_for_the_target_is_said():
    profile = catalogue_profile("b580")
    assert compile_target(profile) is None
    spec = decode_spec()
    accepted = fit.fit(spec, profile, rank_tiles(spec, profile))
    assert "no compiler for intel bmg" in accepted.compiled.error


def test_targets_follow_the_profile():
    assert compile_target(catalogue_profile("rtx_pro_6000")) == ("cuda", 120, 32)
    assert compile_target(catalogue_profile("mi355x")) == ("hip", "gfx950", 64)
    assert compile_target(catalogue_profile("gfx1151")) == ("hip", "gfx1151", 32)


@pytest.fixture
def compiler(monkeypatch):
    """Stands for the compile check: shared memory and spills as the test says."""
    tried = []

    def install(shared, spill=lambda config: 0):
        def stand_in(spec, configs, profile, entry=None, cache=None):
            tried.extend(configs)
            kernels = (Footprint("k", shared(c), 100, spill(c), 32 * c.num_warps) for c in configs)
            return [Compiled((kernel,)) for kernel in kernels]

        monkeypatch.setattr(fit, "measure", stand_in)
        return tried

    return install


def test_too_much_shared_memory_steps_down_stages_before_the_tile(compiler):
    spec, profile = decode_spec(tokens=4096, batch=1), catalogue_profile("h200")
    ranking = rank_tiles(spec, profile)
    first = ranking.configs[0]
    tried = compiler(lambda config: 300_000 if config.block_m * config.block_n >= first.block_m * first.block_n else 1)
    accepted = fit.fit(spec, profile, ranking)
    stages = [c.num_stages for c in tried if (c.block_m, c.block_n, c.num_warps) == (128, 64, first.num_warps)]
    assert stages == sorted(stages, reverse=True)
    assert accepted.config.block_m * accepted.config.block_n < first.block_m * first.block_n
    assert [config for config, _ in accepted.steps] == tried[:-1]
    assert "needs 300000 bytes of shared memory; the device has 232448" in accepted.steps[0][1]


def test_the_best_ranked_of_what_needs_fewer_registers_follows_a_tile_that_spills(compiler):
    spec, profile = decode_spec(), catalogue_profile("h200")
    ranking = rank_tiles(spec, profile)
    first = ranking.configs[0]
    estimate = {config: register_estimate(spec, profile, config) for config in ranking.configs}
    tried = compiler(lambda config: 1, lambda config: 8 if config == first else 0)
    accepted = fit.fit(spec, profile, ranking)
    assert accepted.config == next(c for c in ranking.configs if estimate[c] < estimate[first])
    lightest = min((c for c in ranking.configs if c != first), key=estimate.__getitem__)
    assert tried == [first, lightest, accepted.config]
    assert accepted.steps == ((first, "8 bytes of a thread's registers spill"),)
    assert accepted.verdict == ""


def test_spills_cost_a_first_call_three_further_compiles_and_the_matrix_every_tile_that_might_not(compiler):
    spec, profile = decode_spec(tokens=4096, batch=1), catalogue_profile("h200")
    ranking = rank_tiles(spec, profile)
    tried = compiler(lambda config: 1, lambda config: 64 // config.num_warps)
    accepted = fit.fit(spec, profile, ranking)
    assert len(tried) == 4
    assert accepted.compiled.spill == min(64 // config.num_warps for config in tried)
    assert not accepted.exhausted
    assert accepted.verdict.startswith(
        "it spills the least of the 4 tiles compiled, none of which does not; the rest were"
    )

    tried.clear()
    accepted = fit.fit(spec, profile, ranking, spill_steps=None)
    assert accepted.exhausted
    assert accepted.compiled.spill == 64 // max(config.num_warps for config in ranking.configs)
    shapes = [(c.block_m, c.block_n, c.num_warps) for c in tried]
    for config in ranking.configs:  # each was tried, or one no larger under no fewer warps was
        assert any(m <= config.block_m and n <= config.block_n and w >= config.num_warps for m, n, w in shapes)
    least = shapes[tried.index(accepted.config)]
    stages = {c.num_stages for c in ranking.configs if (c.block_m, c.block_n, c.num_warps) == least}
    assert {c.num_stages for c, shape in zip(tried, shapes, strict=True) if shape == least} == stages
    assert f"of the {len(tried)} tiles compiled" in accepted.verdict


def test_other_stages_are_no_hope_where_much_spills(compiler):
    spec, profile = decode_spec(tokens=4096, batch=1), catalogue_profile("h200")
    tried = compiler(lambda config: 1, lambda config: 8192 // config.num_warps)
    accepted = fit.fit(spec, profile, rank_tiles(spec, profile), spill_steps=None)
    assert accepted.exhausted
    assert len(tried) == 2  # the first, and the lightest, which settles all others


def test_a_tile_that_alone_does_not_spill_is_found(compiler):
    spec, profile = decode_spec(), catalogue_profile("h200")
    ranking = rank_tiles(spec, profile)
    smallest = min(ranking.configs, key=lambda c: register_estimate(spec, profile, c))
    shape = (smallest.block_m, smallest.block_n, smallest.num_warps)
    compiler(lambda config: 1, lambda c: 0 if (c.block_m, c.block_n, c.num_warps) == shape else 8)
    accepted = fit.fit(spec, profile, ranking)  # within the compiles of a first call: the lightest is the last of them
    assert (accepted.config.block_m, accepted.config.block_n, accepted.config.num_warps) == shape
    assert len(accepted.steps) <= fit.RUN_TIME_STEPS


def test_nothing_fits_is_a_typed_refusal_with_the_numbers(compiler):
    spec, profile = decode_spec(), catalogue_profile("t4")
    compiler(lambda config: 65792)
    with pytest.raises(OutOfResourcesError, match="needs 65792 bytes of shared memory; the device has 65536"):
        fit.fit(spec, profile, rank_tiles(spec, profile))


def test_step_down_ends():
    ranking = rank_tiles(decode_spec(), catalogue_profile("rtx4090"))
    tried = {ranking.configs[0]: ""}
    config = ranking.configs[0]
    while (config := step_down(config, ranking, tried)) is not None:
        assert config not in tried
        tried[config] = ""
    assert set(tried) == set(ranking.configs)


def test_a_kernels_file_that_is_no_source_is_compared_as_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    kernel, broken = tmp_path / "kernel_beside.py", tmp_path / "half_written_beside.py"
    kernel.write_text("import half_written_beside")
    digests = set()
    for text in ("def kernel(:", "def kernel(::", "x = 1\0"):
        broken.write_text(text)
        sources.sources_of.cache_clear()
        digests |= {sources.sources_of("kernel_beside"), sources.sources_of("half_written_beside")}
    assert len(digests) == 6
