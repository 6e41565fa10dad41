"""The layering of tcport, read from its source: imports go downward, private torch names stay in one package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tcport"
MAX_LINES = 360

# Longest match wins. A module may import from its own layer and from every lower one.
LAYERS = {
    "tcport.errors": 0,
    "tcport.user_cache": 0,
    "tcport.locks": 0,
    "tcport.ir": 0,
    "tcport.options": 0,
    "tcport.device": 0,
    "tcport.kernels": 0,
    "tcport.ops": 1,
    "tcport.operator_library": 1,
    "tcport.argument_types": 1,
    "tcport.checks": 1,
    "tcport.debug": 1,
    "tcport.shared_prefix": 1,
    "tcport.requirements": 1,
    "tcport.inference_only": 1,
    "tcport.graph_pass": 1,
    "tcport.graph_facts": 1,
    "tcport.effects": 1,
    "tcport.functional_write": 1,
    "tcport.fused_ops": 1,
    "tcport.sequential_op": 1,
    "tcport.layer_ops": 1,
    "tcport.int4_ops": 1,
    "tcport.quantise_ops": 1,
    "tcport.rope_op": 1,
    "tcport.pass_manager": 1,
    "tcport.pass_checks": 1,
    "tcport.pass_dump": 1,
    "tcport.pass_values": 1,
    "tcport.pattern": 1,
    "tcport.pattern_match": 1,
    "tcport.no_ops": 1,
    "tcport.tiling": 1,
    "tcport.report": 1,
    "tcport.fingerprint": 1,
    "tcport.cache_folders": 1,
    "tcport.counting": 1,
    "tcport.logs": 1,
    "tcport.adapter": 2,
    "tcport.passes": 2,
    "tcport.lowering": 2,
    "tcport.repeatable": 2,
    "tcport.probes": 2,
    "tcport.bundle": 2,
    "tcport.bundle.command": 4,
    "tcport._inductor": 3,
    "tcport.pattern_engine": 3,
    "tcport.eager": 4,
    "tcport.invalid": 4,
    "tcport.backend": 4,
    "tcport.compilation": 4,
    "tcport.history": 4,
    "tcport.chain": 4,
    "tcport.doctor": 4,
    "tcport.failures": 4,
    "tcport.quarantine": 4,
    "tcport.remembered": 4,
    "tcport.describe": 4,
    "tcport.emission": 4,
    "tcport.attempt": 4,
    "tcport.race": 4,
    "tcport.survival": 4,
    "tcport.attention_only": 4,
    "tcport.explainer": 4,
    "tcport.aot": 4,
    "tcport.testing": 4,
    "tcport.bench": 4,
    "tcport.cli": 4,
    "tcport.__main__": 5,
    # The facade: it may import everything, and since it does, nothing inside the package may import from it.
    "tcport": 5,
}

# The package that may name private parts of torch.
PRIVATE = "tcport._inductor"

# Private by spelling, public by documentation.
PUBLIC_UNDERSCORES = {"torch._check", "torch._check_is_size"}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package, the symlinked directories included."""
    found = {}
    pending = [PACKAGE]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                pending.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def layer(module: str) -> int:
    """The layer of a module, from its longest listed prefix."""
    name = module
    while name not in LAYERS or (name == "tcport" and module != "tcport"):
        if "." not in name:
            raise KeyError(f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}")
        name = name.rpartition(".")[0]
    return LAYERS[name]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Every dotted name a module imports, wherever in it the statement stands; type-checking blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parent, base] if base else parent)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def imported_module(name: str) -> str:
    """``tcport.errors.ShapeError`` -> ``tcport.errors``."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def private_torch_names(tree: ast.AST, module: str) -> set[str]:
    """Dotted names below ``torch`` with a component that starts with one underscore, imported or spelled out."""
    aliases = {"torch": "torch"}
    named = set(imports(tree, module, False))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if alias.asname or base:
                    aliases[alias.asname or alias.name] = base + alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, tail = ast.unparse(node).partition(".")
            if head.isidentifier() and head in aliases:
                named.add(f"{aliases[head]}.{tail}")
    return {name for name in named if is_private_torch(name)}


def is_private_torch(name: str) -> bool:
    """True for ``torch._dynamo.reset`` and ``torch.fx._x``; false for ``torch.__version__`` and ``torch._check``."""
    parts = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and private and ".".join(parts[:2]) not in PUBLIC_UNDERSCORES


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def test_every_row_of_the_table_is_of_a_module() -> None:
    assert set(LAYERS) - set(MODULES) == set()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module: str) -> None:
    own = layer(module)
    is_package = MODULES[module].name == "__init__.py"
    targets = {imported_module(name) for name in imports(parse(MODULES[module]), module, is_package)}
    upward = {t for t in targets if t.partition(".")[0] == "tcport" and layer(t) > own}
    assert upward == set(), f"{module} (L{own}) imports from a higher layer"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("tcport.kernels")])
def test_kernels_need_torch_and_triton_alone(module: str) -> None:
    is_package = MODULES[module].name == "__init__.py"
    roots = {name.partition(".")[0] for name in imports(parse(MODULES[module]), module, is_package)}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "triton", "tcport"}


@pytest.mark.parametrize("module", [m for m in MODULES if not f"{m}.".startswith(f"{PRIVATE}.")])
def test_private_torch_names_stay_in_their_package(module: str) -> None:
    assert private_torch_names(parse(MODULES[module]), module) == set()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_use_the_public_torch_api(path: Path) -> None:
    assert private_torch_names(parse(path), path.stem) == set()


def test_no_module_reaches_around_the_package() -> None:
    """``import kernels`` works from the repository root and would load a second copy of every class."""
    around = {"kernels", "lowering", "passes"}
    sources = [*MODULES.values(), *(ROOT / "examples").glob("*.py"), *(ROOT / "ir_tests").glob("*.py")]
    for path in sources:
        absolute = {name.partition(".")[0] for name in imports(parse(path), "", False)}
        assert absolute & around == set(), path


def test_files_stay_small() -> None:
    sources = [*MODULES.values(), *ROOT.glob("examples/*.py")]
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", {"torch._dynamo"}),
        (
            "import torch\ntorch._inductor.config.x = 1",
            {"torch._inductor.config.x", "torch._inductor.config", "torch._inductor"},
        ),
        ("from torch import _C", {"torch._C"}),
        ("import torch.fx as fx\nfx._pytree", {"torch.fx._pytree"}),
        ("def f():\n    from torch._guards import detect_fake_mode", {"torch._guards.detect_fake_mode"}),
        ("import torch\ntorch._check(True)\ntorch.__version__", set()),
    ],
)
def test_the_private_name_search_finds(source: str, expected: set[str]) -> None:
    assert private_torch_names(ast.parse(source), "tcport.x") == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from tcport.errors import ShapeError", {"tcport.errors.ShapeError"}),
        ("from . import errors", {"tcport.errors"}),
        ("from .errors import ShapeError", {"tcport.errors.ShapeError"}),
        ("def f():\n    import tcport.backend", {"tcport.backend"}),
        ("import importlib\nimportlib.import_module('tcport.cli')", {"importlib", "tcport.cli"}),
    ],
)
def test_the_import_search_finds(source: str, expected: set[str]) -> None:
    assert set(imports(ast.parse(source), "tcport.x", False)) == expected
    assert layer("tcport.kernels.x") == 0


def test_kernels_are_told_their_target() -> None:
    """Asked for in a kernel, it starts CUDA, which a forked compile worker of Inductor's cannot."""
    device_code = list((PACKAGE / "kernels").glob("triton_*.py"))
    assert device_code
    for path in device_code:
        assert "target_info" not in path.read_text(encoding="utf-8"), path
