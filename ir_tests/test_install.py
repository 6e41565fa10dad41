"""Every way to get tcport onto a Python path gives the same package, and type checkers find all of it.

The sources of three packages lie beside ``tcport/`` and are symlinked into it. Each test builds from a copy of this
checkout, in an environment of its own that shares nothing but the third-party packages of the running interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREE = ["LICENSE", "README.md", "kernels", "lowering", "passes", "pyproject.toml", "tcport"]
MODULES = ["tcport.adapter", "tcport.errors", "tcport.kernels.reference", "tcport.lowering", "tcport.passes"]

PROBE = f"""
import importlib, importlib.metadata, json
modules = {{name: importlib.import_module(name).__file__ for name in {MODULES}}}
entries = importlib.metadata.entry_points(group="torch_dynamo_backends")
print(json.dumps({{"modules": modules, "backends": [e.value for e in entries if e.name == "tcport"]}}))
"""

# The one mistake in it is reported only by a checker that resolved tcport.kernels.call.
CLIENT = """\
import tcport.adapter
import tcport.lowering
import tcport.passes
from tcport.kernels.call import AttentionCall


def scale_of(call: AttentionCall) -> str:
    return call.scale
"""


class Environment:
    """A virtual environment of its own, with the third-party packages of the running interpreter."""

    def __init__(self, directory: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", directory)
        self.python = directory / "bin" / "python"
        self.site = Path(run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        links = link_third_party(directory.with_name("third_party"))
        self.site.joinpath("third_party.pth").write_text(str(links))

    def install(self, *arguments: str | Path) -> None:
        """``pip install`` with no index to reach."""
        offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
        run(sys.executable, "-m", "pip", "--python", self.python, "install", *offline, *arguments)

    def probe(self, cwd: Path, **variables: str) -> dict[str, Any]:
        """What an interpreter started in ``cwd`` finds."""
        return json.loads(run(self.python, "-c", PROBE, cwd=cwd, **variables))


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=clean() | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean() -> dict[str, str]:
    """The environment without the Python variables of this session."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def link_third_party(directory: Path) -> Path:
    """A directory of links to every installed package but tcport."""
    directory.mkdir()
    for site in (Path(entry) for entry in sys.path):
        if not any(site.glob("*.dist-info")):
            continue
        for entry in site.iterdir():
            link = directory / entry.name
            if "tcport" not in entry.name and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    return directory


def package_files(tcport: Path) -> set[str]:
    """Every file below a ``tcport`` directory that belongs in a distribution, links followed."""
    files = set()
    for directory, _, names in os.walk(tcport, followlinks=True):
        if not directory.endswith("__pycache__"):
            files |= {Path(directory, name).relative_to(tcport.parent).as_posix() for name in names}
    return files


def build(checkout: Path, hook: str, output: Path) -> Path:
    """Run one hook of the build backend in ``checkout``; ``build_wheel`` or ``build_sdist``."""
    output.mkdir()
    run(sys.executable, "-c", f"import setuptools.build_meta as b; b.{hook}({str(output)!r})", cwd=checkout)
    return next(output.iterdir())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout, links kept, to build in."""
    target = tmp_path / "checkout"
    target.mkdir()
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)
    return target


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


def assert_all_below(found: dict[str, Any], directory: Path) -> None:
    assert {name for name, file in found["modules"].items() if directory not in Path(file).parents} == set()


def test_wheel_holds_every_file_of_the_package(checkout: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(checkout, "build_wheel", tmp_path / "dist")) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == package_files(checkout / "tcport")


def test_wheel_from_elsewhere_and_from_the_repository_root(
    checkout: Path, environment: Environment, tmp_path: Path
) -> None:
    environment.install(build(checkout, "build_wheel", tmp_path / "dist"))
    elsewhere = environment.probe(tmp_path)
    assert_all_below(elsewhere, environment.site)
    assert elsewhere["backends"] == ["tcport.backend:tcport"]
    # At the root the checkout comes first on the path and must be as whole as what was installed.
    root = environment.probe(checkout)
    assert_all_below(root, checkout)
    assert root["backends"] == ["tcport.backend:tcport"]


def test_sdist_builds_the_same_wheel(checkout: Path, environment: Environment, tmp_path: Path) -> None:
    """Unpacked on its own: what it holds must not be links that lead out of it."""
    with tarfile.open(build(checkout, "build_sdist", tmp_path / "dist")) as sdist:
        assert [member.name for member in sdist if member.issym()] == []
        sdist.extractall(tmp_path / "unpacked")  # built here; the parameter that guards against others came with 3.11.4
    unpacked = next((tmp_path / "unpacked").iterdir())
    assert package_files(unpacked / "tcport") == package_files(checkout / "tcport")
    shutil.rmtree(checkout)
    environment.install(unpacked)
    assert_all_below(environment.probe(tmp_path), environment.site)


def test_editable_install(checkout: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install("-e", checkout)
    found = environment.probe(tmp_path)
    assert_all_below(found, checkout)
    assert found["backends"] == ["tcport.backend:tcport"]
    # A file added later is there without another install.
    (checkout / "kernels" / "later.py").write_text("VALUE = 7\n")
    assert run(environment.python, "-c", "from tcport.kernels.later import VALUE; print(VALUE)", cwd=tmp_path) == "7\n"


def test_bare_checkout(checkout: Path, environment: Environment, tmp_path: Path) -> None:
    assert_all_below(environment.probe(checkout), checkout)
    assert_all_below(environment.probe(tmp_path, PYTHONPATH=str(checkout)), checkout)


def tool(name: str) -> list[str | Path]:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; `make test` installs it")
    return [sys.executable, "-m", name]


@pytest.fixture(params=["wheel", "editable"])
def client(request: pytest.FixtureRequest, checkout: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A source file that uses tcport, and the interpreter tcport is installed for."""
    environment = Environment(tmp_path / "env")
    environment.install(*(["-e"] if request.param == "editable" else []), checkout)
    source = tmp_path / "client" / "client.py"
    source.parent.mkdir()
    source.write_text(CLIENT)
    # The checker needs no torch to resolve tcport, and reading it takes most of a minute.
    environment.site.joinpath("third_party.pth").unlink()
    return source, environment.python


def test_mypy_resolves_every_package(client: tuple[Path, Path]) -> None:
    source, python = client
    command = [*tool("mypy"), "--python-executable", python, "--cache-dir", os.devnull, source]
    done = subprocess.run(command, cwd=source.parent, env=clean(), capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, done.stdout
    assert 'Incompatible return value type (got "float", expected "str")' in errors[0]


def test_pyright_resolves_every_package(client: tuple[Path, Path]) -> None:
    source, python = client
    command = [*tool("pyright"), "--pythonpath", python, "--outputjson", source]
    done = subprocess.run(command, cwd=source.parent, env=clean(), capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [(entry["range"]["start"]["line"], entry["rule"]) for entry in found] == [(7, "reportReturnType")]
