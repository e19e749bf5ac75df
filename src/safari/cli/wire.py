"""`safari wire`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from safari.cli.offers import complete_run
from safari.cli.options import json_option, trust_option
from safari.errors import RunError
from safari.trust import using

# A model of 268 million numbers as they are in memory; explaining one takes several times as much.
LARGEST = 2**30
F = TypeVar("F", bound=Callable[..., Any])


def upload_options(function: F) -> F:
    """`--arm` and `--client`: which upload of a run; `inspect` has to name the one that `bench` saved."""
    arm = click.option("--arm", help="Whose model.  [default: the last arm's]")
    client = click.option(
        "--client", type=click.IntRange(min=0), default=0, show_default=True, help="Who sends it."
    )
    return arm(client(function))


@click.group(short_help="Look at messages: what they hold, and what they cost.")
def wire() -> None:
    """Look at the wire format: what a message holds, and what it costs."""


@wire.command(short_help="Explain a frame or a packet, part by part.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--run",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    shell_complete=complete_run,
    help="The run that the frame came from: then its layout is known, and the body can be read.",
)
@upload_options
@trust_option
@json_option
def inspect(
    file: Path, folder: Path | None, arm: str | None, client: int, trust: bool, as_json: bool
) -> None:
    """Explain a frame or a packet: modes, bytes by part, density by layer, distance from the entropy bound.

    With --run, give the --arm and --client that `safari wire bench` had when it wrote the file: each arm has
    a model and a mask of its own.

    \b
    Example:
      safari wire bench runs/mine --arm safari --save upload.frame
      safari wire inspect upload.frame --run runs/mine --arm safari
    """
    from safari.wire import SharedKnowledgeError
    from safari.wire import inspect as explain

    data = _read(file)
    if folder is None and (arm is not None or client):
        raise click.UsageError("--arm and --client need --run: they say which upload of the run it is")
    try:
        found = explain(data, _upload(folder, arm, client, trust).shared if folder else None)
    except SharedKnowledgeError as error:
        of = "the last arm" if arm is None else f"arm {arm}"
        raise RunError(f"{file} is not the next upload of {of} of {folder} (see --arm): {error}") from error
    if as_json:
        click.echo(json.dumps(_plain(found), indent=2))
        return
    click.echo(f"{found.kind} of {found.size:,} bytes; values {found.modes.values}, mask {found.modes.mask}")
    for name, size in found.parts.items():
        bound = (
            "" if found.bound is None or name not in found.bound else f"  (bound {found.bound[name]:,.0f})"
        )
        click.echo(f"  {name:<8} {size:>10,}{bound}")
    if found.over_bound is not None and found.dense_ratio is not None:
        click.echo(
            f"{found.over_bound:.3f} of the entropy bound; {found.dense_ratio:.1f}× below dense float32"
        )
    for entry in found.density or ():
        click.echo(
            f"  {entry.name:<40} {entry.kept:>9,} of {entry.size:>9,}  {_share(entry.kept, entry.size)}"
        )


@wire.command(short_help="What the next upload of a run costs in every mode.")
@click.argument(
    "folder", metavar="RUN", type=click.Path(path_type=Path, file_okay=False), shell_complete=complete_run
)
@upload_options
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the smallest exact frame."
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the upload as .npz, for benchmarks/wire.py.",
)
@trust_option
@json_option
def bench(
    folder: Path,
    arm: str | None,
    client: int,
    save: Path | None,
    record: Path | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Show the cost of a run's next upload in every mode, next to plain formats for a sparse model.

    One client is trained from the arm's last checkpoint, as the next round would do; its model is encoded.
    """
    import numpy as np

    from safari.runs.files import write_atomically
    from safari.wire import Lossy, bounds, costs, encode, plain_costs

    upload = _upload(folder, arm, client, trust)
    layout, shared = upload.shared.layout, upload.shared
    if save is not None:
        write_atomically(save, encode(upload.vector, upload.mask, shared))
    if record is not None:
        from safari.engine.sample import save_upload

        save_upload(record, upload)
    lossy = Lossy(rng=np.random.default_rng(0))
    rows = plain_costs(upload.vector, upload.mask, layout)
    rows += costs(upload.vector, upload.mask, shared, lossy=lossy)
    limits = bounds(upload.vector, upload.mask, layout)
    if as_json:
        table = {"costs": [dataclasses.asdict(row) for row in rows], "bounds": dataclasses.asdict(limits)}
        click.echo(json.dumps(table, indent=2))
        return
    dense = rows[0].size
    click.echo(f"{'':<34} {'bytes':>12} {'below dense':>12} {'error':>9} {'as packets':>11}")
    for row in rows:
        error = f"{row.error:.2g}" if row.error else "exact"
        more = f"{row.packet_bytes / row.size - 1:+.1%}" if row.packet_bytes else ""
        click.echo(f"{row.name:<34} {row.size:>12,} {dense / row.size:>11.1f}× {error:>9} {more:>11}")


def _read(file: Path) -> bytes:
    """A message from anywhere, also through links; what is no plain file is not waited for."""
    from safari.runs.files import read_plain

    try:
        return read_plain(Path(os.path.realpath(file)), limit=LARGEST)
    except FileNotFoundError as error:
        raise RunError(f"cannot read {file}: {error.strerror}") from error


def _upload(folder: Path, arm: str | None, client: int, trust: bool) -> Any:
    from safari.engine.sample import next_upload
    from safari.runs import RunFolder
    from safari.runs.code import refuse_changed_code

    run = RunFolder.open(folder)
    refuse_changed_code(run)
    with using(run.path / "config.toml", trust):
        return next_upload(run, arm, client)


def _share(kept: int, size: int) -> str:
    return f"{kept / size:6.1%}" if size else "     –"


def _plain(found: Any) -> dict[str, Any]:
    """An inspection as JSON values: digests in hexadecimal, derived ratios included."""
    table = dataclasses.asdict(
        found, dict_factory=lambda pairs: {k: v.hex() if isinstance(v, bytes) else v for k, v in pairs}
    )
    return table | {"over_bound": found.over_bound, "dense_ratio": found.dense_ratio}
