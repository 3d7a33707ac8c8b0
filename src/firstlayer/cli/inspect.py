"""``firstlayer inspect``: describe the embedding tables of a checkpoint."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ._output import amount, cli_command, columns, counted, emit

if TYPE_CHECKING:
    from ..analysis.inspect import OddRows, Report, Table

EXAMPLES = """
firstlayer inspect model.safetensors
firstlayer inspect checkpoint/    sharded, with an index
firstlayer inspect vectors --json
firstlayer inspect model.safetensors --tensor classifier.weight
"""


@cli_command(examples=EXAMPLES)
@click.argument("path")
@click.option(
    "--tensor",
    "names",
    multiple=True,
    metavar="NAME",
    help="Describe this tensor instead of the embedding tables; may be repeated.",
)
def command(path: str, names: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Describe the embedding tables in PATH and the position scheme of its config.

    PATH is a safetensors or PyTorch file, an index of several, or a folder with either,
    such as a transformers checkpoint or the output of firstlayer train; or any other table
    as for firstlayer neighbors. Only tables are read, in chunks.
    """
    from ..analysis.inspect import inspect

    found = inspect(path, names=names)
    emit(found, _text(found), as_json=as_json)


def _text(found: "Report") -> Iterator[str]:
    tensors, files = counted(found.tensors, "tensor"), counted(found.files, "file")
    yield f"{found.path}: {tensors} in {files}"
    for table in found.tables:
        yield ""
        yield from _table(table)
    yield ""
    tied = {True: "yes", False: "no", None: "unknown"}[found.tied]
    scheme = found.position
    detail = f": {scheme.detail}" if scheme.detail else ""
    yield from columns([
        ("tied", f"{tied}: {found.why_tied}"),
        ("positions", f"{scheme.kind}{detail}"),
    ])


def _table(table: "Table") -> Iterator[str]:
    rows, width = table.shape
    role = f" ({table.role})" if table.role else ""
    size = amount(table.nbytes)
    yield f"{table.name}{role}: {rows:,} × {width:,} {table.dtype}, {size}"
    norms = table.norm_min, table.norm_median, table.norm_max
    sampled = "" if table.rank_rows == rows else f", from {table.rank_rows:,} rows"
    lines = [
        ("norms", "min {:.3g}, median {:.3g}, max {:.3g}".format(*norms)),
        ("effective rank", f"{table.effective_rank:.1f} of {min(rows, width)}{sampled}"),
        ("zero rows", _odd(table.zero)),
        ("duplicate rows", _odd(table.duplicate)),
        ("not finite", _odd(table.not_finite)),
        ("under-trained", _odd(table.under_trained)),
    ]
    yield from ("  " + line for line in columns(lines))


def _odd(odd: "OddRows") -> str:
    if not odd.count:
        return "0"
    shown = odd.tokens if len(odd.tokens) == len(odd.rows) else map(str, odd.rows)
    more = ", …" if odd.count > len(odd.rows) else ""
    return f"{odd.count:,}: {', '.join(shown)}{more}"
