"""Building the C++ kernels: once, whoever asks first; and what happens where they cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from tcport.bundle.command import app
from tcport.kernels import cpu_library

ROOT = Path(__file__).resolve().parents[1]

LOAD = "from tcport.kernels import cpu_library; print(cpu_library.load().isa)"

ATTEND = """
import torch, tcport
from tcport.device import device_profile
from tcport.kernels import reference
from tcport.lowering.operators import PAGED_ATTENTION, choose
k, v = torch.randn(2, 6, 4, 2, 16)
args = (torch.randn(2, 4, 16), k, v, torch.tensor([[4, 1], [0, 3]]), torch.tensor([3, 8]))
torch.testing.assert_close(tcport.paged_attention(*args), reference.paged_attention(*args)[0])
selection = choose(PAGED_ATTENTION, PAGED_ATTENTION.call(*args), device_profile("cpu")).selection
print([c.kernel for c in selection.candidates], [str(r) for r in selection.rejections])
"""

EXPLAIN = (
    ATTEND[: ATTEND.index("torch.testing")]
    + """
print(tcport.explain(tcport.paged_attention, *args))
"""
)


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err


def counting_compiler(folder: Path) -> Path:
    """A compiler that writes down its calls and, asked to link, gives the library that is built already."""
    compiler = folder / "compiler"
    compiler.write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/calls
for target; do :; done
case "$target" in
  *.so) cp {cpu_library.build()} "$target" ;;
  *.o) sleep 0.1; : > "$target" ;;
  *) echo fake 1.0 ;;
esac
"""
    )
    compiler.chmod(0o755)
    return compiler


def test_without_a_compiler_attention_is_right_and_the_reason_is_told(tmp_path: Path) -> None:
    out, _ = output(start(ATTEND, PATH=str(tmp_path), CXX="", TCPORT_CACHE_DIR=str(tmp_path / "cache")))
    assert out.startswith("['torch_attention']")
    assert "cpp_attention: No C++ compiler is on the PATH" in out


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    out, _ = output(start(ATTEND, CXX=str(compiler), TCPORT_CACHE_DIR=str(tmp_path / "cache")))
    assert out.startswith("['torch_attention']")
    assert f"{compiler} could not build the CPU kernels: x.cpp:1: error: no such thing" in out


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start(LOAD, TCPORT_CACHE_DIR=str(tmp_path / "file"))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Set TCPORT_CACHE_DIR to a folder that can be written" in err


def test_processes_that_race_build_once_and_none_builds_again(tmp_path: Path) -> None:
    compiler = counting_compiler(tmp_path)
    environment = {"CXX": str(compiler), "TCPORT_CACHE_DIR": str(tmp_path / "cache")}
    racing = [output(process) for process in [start(LOAD, **environment) for _ in range(3)]]
    assert {out.strip() for out, _ in racing} == {cpu_library.load().isa}
    assert sum("building the CPU kernels" in err for _, err in racing) == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len([call for call in calls if "-shared" in call]) == 1

    _, err = output(start(LOAD, **environment))
    assert "building" not in err
    without_compiler, _ = output(start(LOAD, **{**environment, "CXX": "/nowhere"}))
    assert without_compiler.strip() == cpu_library.load().isa
    again = (tmp_path / "calls").read_text().splitlines()[len(calls) :]
    assert again == ["--version"]


def test_a_library_in_the_cache_that_was_cut_short_is_built_again(tmp_path: Path) -> None:
    """To load it would end the process: its pages lie behind the end of the file."""
    environment = {"CXX": str(counting_compiler(tmp_path)), "TCPORT_CACHE_DIR": str(tmp_path / "cache")}
    output(start(LOAD, **environment))
    (library,) = (tmp_path / "cache").glob("cpu/*/*/*.so")
    whole = library.read_bytes()
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 1
    for damaged in (whole[: len(whole) // 2], bytes(spoilt)):
        library.write_bytes(damaged)
        out, _ = output(start(ATTEND, **{**environment, "CXX": "/nowhere"}))
        assert out.startswith("['torch_attention']")
        assert "the cache holds no CPU kernels" in out
        out, err = output(start(ATTEND, **environment))
        assert out.startswith("['cpp_attention', 'torch_attention']")
        assert "building the CPU kernels" in err
        assert library.read_bytes() == whole


def test_a_bundle_has_the_kernels_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    done = CliRunner().invoke(app, ["build", "--device", "cpu", "-o", str(bundle)])
    assert done.exit_code == 0, done.output
    assert "the kernels of the CPU for cpu" in done.output
    assert CliRunner().invoke(app, ["verify", str(bundle)]).exit_code == 0

    bare = {"PATH": str(tmp_path), "CXX": "", "TCPORT_CACHE_DIR": str(tmp_path / "cache")}
    out, _ = output(start(ATTEND, TCPORT_BUNDLE=str(bundle), **bare))
    assert out.startswith("['cpp_attention', 'torch_attention']")

    library = bundle / cpu_library.build().name
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    out, err = output(start(ATTEND, TCPORT_BUNDLE=str(bundle), **bare))
    assert out.startswith("['torch_attention']")
    assert f"{library} is corrupt" in err
    verified = CliRunner().invoke(app, ["verify", str(bundle)])
    assert verified.exit_code == 1
    assert f"{library} is corrupt" in verified.output


def test_explain_says_why_there_are_no_kernels(tmp_path: Path) -> None:
    bare = {"PATH": str(tmp_path), "CXX": "", "TCPORT_CACHE_DIR": str(tmp_path / "cache")}
    out, _ = output(start(EXPLAIN, **bare))
    assert "cpp_attention: No C++ compiler is on the PATH" in out
    assert "torch_attention" in out


def test_the_outlook_before_and_after_a_build(tmp_path: Path) -> None:
    compiler = counting_compiler(tmp_path)
    environment = {"CXX": str(compiler), "TCPORT_CACHE_DIR": str(tmp_path / "cache")}
    say = "from tcport.kernels import cpu_library; print(cpu_library.outlook())"
    before, _ = output(start(say, **environment))
    assert before.strip() == f"will be built at first use by {compiler}"
    output(start(LOAD, **environment))
    after, _ = output(start(say, **environment))
    assert after.startswith(f"built: {tmp_path / 'cache'}")
    none, _ = output(start(say, PATH=str(tmp_path), CXX="", TCPORT_CACHE_DIR=str(tmp_path / "other")))
    assert none.startswith("none: there is no C++ compiler")


def test_the_environment_chooses_an_instruction_set() -> None:
    out, _ = output(start(LOAD, TCPORT_CPU_ISA="baseline"))
    assert out.strip() == "baseline"
    out, _ = output(start(ATTEND, TCPORT_CPU_ISA="vax"))
    assert "cpp_attention: TCPORT_CPU_ISA is 'vax', and this processor has no such kernels" in out
