"""``python -m tcport bundle build | inspect | verify``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from tcport.bundle.manifest import Bundle, read_bundle
from tcport.device import device_profile, load_profile
from tcport.errors import ArgumentError, TcportError
from tcport.ir import AttentionSpec
from tcport.kernels import cpu_library
from tcport.tiling.footprint import compile_target
from tcport.tiling.plan import plain_spec
from tcport.tiling.sources import kernel_sources

app = typer.Typer(no_args_is_help=True, help="Kernels compiled ahead, for machines without a compiler.")

_DEFAULTS: dict[str, Any] = {
    "num_q_heads": 32, "num_kv_heads": 8, "dim_qk": 128, "page": 16, "batch": 64, "context": 8192, "tokens": None,
    "dtype": "bfloat16", "latent": False,
}  # fmt: skip


@app.command()
def build(
    device: Annotated[str, typer.Option(help="Catalogue name or profile file of the GPU to build for, or cpu.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    spec: Annotated[
        Path | None, typer.Option(help="JSON: a list of tables such as {'num_q_heads': 32, 'tokens': 512}.")
    ] = None,
    tiles: Annotated[int, typer.Option(help="Best tiles to keep of each spec.")] = 2,
    index_dtype: Annotated[str, typer.Option(help="dtype of block tables and lengths: int32 or int64.")] = "int32",
) -> None:
    """Compile a GPU's attention kernels for some specs, the writes that fill their caches, and the CPU's kernels."""
    from tcport.bundle.build import build_bundle, build_cpu_bundle  # they import Triton; other commands do without

    left_out: list[str] = []
    try:
        if device == "cpu":
            bundle = build_cpu_bundle(output)
        elif spec is None:
            raise ArgumentError(
                f"--device {device} is given without --spec.", "Say which calls to compile kernels for."
            )
        else:
            profile = load_profile(device)
            bundle, left_out = build_bundle(read_specs(spec), profile, output, tiles=tiles, index_dtype=index_dtype)
    except TcportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    for sentence in left_out:
        typer.echo(f"left out: {sentence}")
    typer.echo(f"{output}: {_contents(bundle)} for {bundle.target[0]} {bundle.target[1]}")


@app.command()
def inspect(folder: Path) -> None:
    """What a bundle holds."""
    try:
        bundle = read_bundle(folder)
    except TcportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{folder}: for {bundle.device}, target {bundle.target[0]} {bundle.target[1]}, ABI {bundle.abi}")
    typer.echo(f"built by triton {bundle.compiler} from kernel sources {bundle.sources[:16]}")
    lines = Counter(
        f"{e.kernel} {e.tile['block_m']}x{e.tile['block_n']} w{e.tile['num_warps']} st{e.tile['num_stages']}: "
        f"{e.function}, {e.shared} bytes shared, {e.threads} threads, {len(e.aligned)} aligned, {_facts(e.facts)}"
        for e in bundle.entries
    )
    for line in lines:
        typer.echo(f"  {line}")
    if bundle.cpu:
        typer.echo(f"  kernels of the CPU: {bundle.cpu['file']}, identity {bundle.cpu['identity']}")


@app.command()
def verify(
    folder: Path,
    device: Annotated[
        str | None, typer.Option(help="Catalogue name, profile file or cpu; default: the present one.")
    ] = None,
) -> None:
    """Whether a bundle is whole and may run on a device; exit code 1 when not, with each reason."""
    try:
        bundle = read_bundle(folder)
        profile = device_profile() if device is None else load_profile(device)
    except TcportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    faults = bundle.faults()
    refusal = bundle.refusal(profile, compile_target(profile), kernel_sources()) if bundle.entries else None
    if bundle.target[0] == "cpu" and bundle.cpu and bundle.cpu["identity"] != cpu_library.identity():
        refusal = f"{folder} was built from other sources, or for another torch or processor, than are here"
    for fault in [*faults, *([refusal] if refusal else [])]:
        typer.echo(fault)
    if faults or refusal:
        raise typer.Exit(1)
    typer.echo(f"{folder}: {_contents(bundle)}, whole, made for {bundle.target[0]} {bundle.target[1]}")


def read_specs(path: Path) -> list[AttentionSpec]:
    """The specs of a JSON file: a list of tables; names and defaults as in ``_DEFAULTS``.

    Raises:
        ArgumentError: the file cannot be read, or names something else.
    """
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}.", "Give a JSON list of tables.") from error
    specs = []
    for table in tables if isinstance(tables, list) else [tables]:
        if not isinstance(table, dict):
            raise ArgumentError(f"{path} lists {table!r}, which is no table.", "Give a JSON list of tables.")
        known = [*_DEFAULTS, "dim_v", "kv_dtype"]
        if unknown := sorted(set(table) - set(known)):
            raise ArgumentError(f"{path} names {', '.join(unknown)}.", f"Known names: {', '.join(known)}.")
        values = {**_DEFAULTS, **table}
        values.setdefault("dim_v", values["dim_qk"])
        values.setdefault("kv_dtype", values["dtype"])
        specs.append(plain_spec(**values))
    return specs


def _contents(bundle: Bundle) -> str:
    kernels = [f"{len(bundle.entries)} kernels"] if bundle.entries else []
    return " and ".join([*kernels, *(["the kernels of the CPU"] if bundle.cpu else [])])


def _facts(facts: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items() if value not in (None, False))
