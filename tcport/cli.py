"""The command line: ``python -m tcport plan``, ``devices``, ``doctor``, ``bundle``, ``bench``, ``tune`` and others."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from tcport.bench.command import bench
from tcport.bench.sweep_command import sweep
from tcport.bench.tune_command import tune
from tcport.bundle.command import app as bundle_app
from tcport.device import FACTS, DeviceProfile, catalogue, catalogue_profile, device_profile, load_profile
from tcport.device.cpu_source import OF_GPUS
from tcport.device.sources import present_devices
from tcport.doctor import examine, healthy
from tcport.errors import TcportError
from tcport.ir import TileConfig
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import select
from tcport.lowering.spec import kind_of
from tcport.tiling.matrix import DEVICES, DIMS, PAGES, cells
from tcport.tiling.matrix import DTYPES as MATRIX_DTYPES
from tcport.tiling.matrix import run as run_matrix
from tcport.tiling.matrix_tables import counts, summary, table
from tcport.tiling.plan import Plan, make_plan, plain_spec

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Paged attention for torch.compile: what a machine can run, with which tiles and why, and how fast.",
)
# A pipe has no width of its own: tables get room for their names.
_console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)

_TIES = "Estimates within a hundredth of each other count as equal; among such the leaner tile goes first."

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


@app.command()
def plan(
    device: Annotated[
        str | None, typer.Option(help="Catalogue name, profile file or cpu; default: the present one.")
    ] = None,
    hq: Annotated[int, typer.Option(help="Query heads.")] = 32,
    hkv: Annotated[int, typer.Option(help="KV heads.")] = 8,
    dim: Annotated[int, typer.Option(help="Head dim of queries and keys.")] = 128,
    dim_v: Annotated[int | None, typer.Option(help="Head dim of values; default: the keys'.")] = None,
    page: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 64,
    context: Annotated[int, typer.Option(help="Keys of the longest sequence.")] = 8192,
    tokens: Annotated[int | None, typer.Option(help="Query tokens of the batch; default: decode.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of queries: {', '.join(_DTYPES)}.")] = "bf16",
    kv_dtype: Annotated[str | None, typer.Option(help="Of the cache; default: the queries'.")] = None,
    latent: Annotated[bool, typer.Option(help="V is the first components of K (MLA).")] = False,
    eager: Annotated[
        bool,
        typer.Option("--eager", help="Plan as an eager call does: for all sizes of its kind, not for these alone."),
    ] = False,
    compile_check: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the best tiles.")] = True,
    top: Annotated[int, typer.Option(help="Tiles and rejections to print.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False,
) -> None:
    """Rank the tiles of one call on one device, with every reason and the compiled footprint."""
    try:
        profile = device_profile() if device is None else load_profile(device)
        spec = plain_spec(
            num_q_heads=hq,
            num_kv_heads=hkv,
            dim_qk=dim,
            dim_v=dim if dim_v is None else dim_v,
            page=page,
            batch=batch,
            context=context,
            tokens=tokens,
            dtype=_DTYPES.get(dtype, dtype),
            kv_dtype=_DTYPES.get(kv_dtype or dtype, kv_dtype or dtype),
            latent=latent,
        )
        spec = kind_of(spec) if eager else spec
        # What is checked is what Triton makes of a tile; the CPU's C++ kernels are given theirs at run time.
        made = make_plan(spec, profile, check=compile_check and profile.vendor != "cpu")
    except TcportError as error:
        typer.echo(json.dumps({"refusal": str(error)}) if as_json else f"refused: {error}", err=not as_json)
        raise typer.Exit(1) from error
    chain = _chain(made, (batch, tokens or batch, context))
    if as_json:
        typer.echo(json.dumps({**made.to_dict(), "chain": chain}, indent=2))
        return
    _print_plan(made, top)
    if chain:
        _console.print("chain, as the call would try it:")
    for link in chain:
        _console.print("  " + escape(link))


@app.command()
def devices(as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False) -> None:
    """List the devices that are present and those of the catalogue."""
    present = {str(device): device_profile(device) for device in present_devices()}
    listed = {name: catalogue_profile(name) for name in catalogue()}
    if as_json:
        groups = {"present": present, "catalogue": listed}
        typer.echo(json.dumps({k: {n: p.to_dict() for n, p in g.items()} for k, g in groups.items()}, indent=2))
        return
    for title, group in (("present", present), ("catalogue", listed)):
        _console.print(_device_table(title, group))
    for name, profile in present.items():
        if profile.basic_mode:
            _console.print(f"{name} is in basic mode: {escape(profile.basic_mode)}")
        for note in profile.notes:
            _console.print(f"{name}: {escape(note)}")
        none = OF_GPUS if profile.vendor == "cpu" else ()
        missing = [fact for fact in FACTS if fact in profile.unknown and fact not in none]
        if missing:
            _console.print(f"{name}: unknown: {', '.join(missing)} (reasons with --json)")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False) -> None:
    """Say whether this machine can run tcport, and what is missing; exits 1 when something is."""
    findings = examine()
    if as_json:
        tree = {"healthy": healthy(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json.dumps(tree, indent=2))
    else:
        marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fault": "[red]FAULT[/]"}
        for finding in findings:
            _console.print(f"{marks[finding.state]} {escape(finding.name)}: {escape(finding.detail)}")
            if finding.remedy:
                _console.print(f"      {escape(finding.remedy)}")
    raise typer.Exit(0 if healthy(findings) else 1)


@app.command()
def matrix(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for matrix.json, .csv and .md.")],
    targets: Annotated[
        str, typer.Option(help=f"Of {', '.join(DEVICES)}; separated by commas.", show_default="all")
    ] = ",".join(DEVICES),
    dtypes: Annotated[str, typer.Option(help="Of the cache.")] = ",".join(MATRIX_DTYPES),
    dims: Annotated[str, typer.Option(help="Head dims.")] = ",".join(map(str, DIMS)),
    pages: Annotated[str, typer.Option(help="Tokens of a page.")] = ",".join(map(str, PAGES)),
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at a time.")] = os.cpu_count() or 1,
    seconds: Annotated[float, typer.Option(help="No compile is begun after this time; a later run goes on.")] = 86400,
) -> None:
    """Compile the attention kernels for every target, and say what fits, what spills and what is refused."""
    try:
        numbers = ([int(part) for part in text.split(",")] for text in (dims, pages))
        todo = cells(targets.split(","), [_DTYPES.get(name, name) for name in dtypes.split(",")], *numbers)
    except (TcportError, ValueError) as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(1) from error
    out.mkdir(parents=True, exist_ok=True)
    with Progress(console=_console) as progress:
        task = progress.add_task("compiling", total=len(todo))
        outcomes = run_matrix(todo, jobs, lambda outcome: progress.advance(task), seconds)
    (out / "matrix.json").write_text(json.dumps([outcome.to_dict() for outcome in outcomes], indent=1) + "\n")
    (out / "matrix.csv").write_text(table(outcomes))
    (out / "matrix.md").write_text(summary(todo, outcomes))
    _console.print(f"{counts(todo, outcomes)}; see {out / 'matrix.md'}")
    wrong = any(outcome.over_limit or (outcome.spill and not outcome.exhausted) for outcome in outcomes)
    raise typer.Exit(1 if wrong or len(outcomes) < len(todo) else 0)


app.add_typer(bundle_app, name="bundle")
for command in (bench, sweep, tune):
    app.command()(command)


def _chain(made: Plan, sizes: tuple[int, int, int]) -> list[str]:
    """The links of the call's chain, cut as for these numbers of sequences, tokens and keys.

    The CPU's own are known only once its kernels are built, which a plan does not.
    """
    if made.profile.vendor == "cpu":
        return []
    return [str(_sized(link, sizes)) for link in select("paged_attention", made.spec, made.profile).candidates]


def _sized(link: Candidate, sizes: tuple[int, int, int]) -> Candidate:
    tile = link.config
    return dataclasses.replace(link, config=tile.sized(*sizes)) if isinstance(tile, TileConfig) else link


def _print_plan(made: Plan, top: int) -> None:
    ranking, profile = made.ranking, made.profile
    _console.print(f"{ranking.kernel} on {profile.name or profile.vendor} ({profile.arch or 'target unknown'})")
    table = Table("rank", "tile", "estimate, us", caption=_TIES if made.ranking.costs else None)
    costs = ranking.costs or (None,) * len(ranking.configs)
    for place, (config, cost) in enumerate(zip(ranking.configs[:top], costs, strict=False), 1):
        table.add_row(str(place), str(config), "-" if cost is None else f"{cost * 1e6:.1f}")
    _console.print(table)
    if sizes := made.of_sizes():
        _console.print(sizes)
    for line in (*made.terms, *ranking.notes):
        _console.print("  " + escape(line))
    if made.fit is not None:
        for config, reason in made.fit.steps:
            _console.print(f"stepped down from {config}: {escape(reason)}")
        unchecked = made.fit.compiled.error
        outcome = f"not checked: {unchecked}" if unchecked else "compiled:"
        _console.print(f"accepted {made.fit.config}, {escape(outcome)}")
        for footprint in made.fit.compiled.footprints:
            _console.print("  " + escape(str(footprint)))
        if made.fit.verdict:
            _console.print("  " + escape(made.fit.verdict))
    if made.refusal:
        _console.print(f"refused: {escape(made.refusal)}")
    if ranking.rejected:
        _console.print(f"rejected {len(ranking.rejected)}:")
    for config, reason in ranking.rejected[:top]:
        _console.print(f"  {config}: {escape(reason)}")


def _device_table(title: str, group: dict[str, DeviceProfile]) -> Table:
    table = Table("device", "name", "target", "units", "shared/CTA", "L2", "memory", "bandwidth", title=title)
    for name, p in group.items():
        table.add_row(
            name,
            p.name or "?",
            p.arch or "?",
            _number(p.compute_units, 1, ""),
            _number(p.shared_per_cta_optin, 1024, " KiB"),
            _number(p.l2_bytes, 1 << 20, " MiB"),
            _number(p.memory_bytes, 10**9, " GB"),
            _number(p.memory_bandwidth, 1e9, " GB/s"),
        )
    return table


def _number(value: float | None, unit: float, suffix: str) -> str:
    return "?" if value is None else f"{value / unit:.5g}{suffix}"
