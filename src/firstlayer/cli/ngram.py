"""``firstlayer ngram``: describe the n-gram tables of a model, and how a text uses them."""

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ._output import COUNT, amount, cli_command, columns, emit, progress

if TYPE_CHECKING:
    from ..analysis.ngram import Table, Usage

#: Tokens of a text whose rows are shown.
SHOWN = 64
#: Settings of :func:`textwrap.wrap` that keep numbers whole.
UNBROKEN: Any = {"break_long_words": False, "break_on_hyphens": False}
EXAMPLES = """
firstlayer ngram model/                    tables of the model in a folder
firstlayer ngram model/ --text "to be or"  rows that each token reads
firstlayer ngram model/ corpus/*.txt       collisions on a corpus
firstlayer ngram config.json --row-bytes 264
"""


@cli_command(examples=EXAMPLES)
@click.argument("model")
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--text", metavar="TEXT", help="Show the rows that this text reads.")
@click.option(
    "--layer", type=int, metavar="N", help="Layer of the model.  [default: all of them]"
)
@click.option(
    "--row-bytes",
    type=COUNT,
    metavar="N",
    help="Bytes of a row.  [default: those of the released format]",
)
def command(
    model: str,
    files: tuple[str, ...],
    text: str | None,
    layer: int | None,
    row_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Describe the n-gram tables of MODEL, and how FILES use them.

    MODEL is a folder with config.json and tokenizer.json, or a config of DeepSeek-V4.1,
    Qwen3.8-Flash-Next, LongCat-Flash-Lite or BLT, which reads bytes and has no tokenizer.
    An n-gram collides if another n-gram of the FILES has the same row. Page-ins are pages
    of 4 KB that a cold table is read from.
    """
    from ..analysis import ngram as analysis
    from ..ngram import ByteGroups, from_hf
    from ..word_vectors.text import lone_surrogate

    if text is not None and lone_surrogate(text) is not None:
        raise click.UsageError(f"--text must be in the terminal's encoding, got {text!r}")
    config, tokenizer = analysis.read_model(model)
    scheme = from_hf(config, tokenizer)
    has_text = text is not None or bool(files)
    if has_text and tokenizer is None and not isinstance(scheme, ByteGroups):
        raise ValueError("tokenizer.json must be next to the config to read text, got none")
    row_bytes = row_bytes or analysis.row_bytes_of(config)
    layers = analysis.layers_of(scheme) if layer is None else [layer]
    scheme.layout(layers[0])
    tables = [
        table
        for table in analysis.tables(scheme, row_bytes=row_bytes)
        if table.layer in layers
    ]
    result: dict[str, Any] = {"tables": tables}
    lines = list(_tables(tables))
    if row_bytes is None:
        lines.append(
            "the config does not state the bytes of a row: give them by --row-bytes"
        )
    if text is not None:
        tokens, ids = _tokens(text, tokenizer)
        rows = {str(at): scheme(ids[None], layer=at)[0].tolist() for at in layers}
        result["tokens"], result["rows"] = tokens, rows
        lines += ["", *_rows(tokens, rows)]
    if files:
        used = []
        with progress("layers", total=len(layers), quiet=quiet) as draw:
            documents = [_tokens(_read(name), tokenizer)[1] for name in files]
            for at in layers:
                used.append(
                    analysis.usage(scheme, documents, layer=at, row_bytes=row_bytes)
                )
                draw(len(used))
        result["usage"] = used
        lines += ["", *_usage(used)]
    emit(result, lines, as_json=as_json)


def _read(name: str) -> str:
    from ..word_vectors.text import read_blocks

    return "".join(read_blocks(name))


def _tokens(text: str, tokenizer: Any) -> tuple[list[str], Any]:
    """Return the tokens of a text and their ids: bytes without a tokenizer."""
    import numpy as np

    if tokenizer is None:
        data = text.encode()
        return [f"{byte:#04x}" for byte in data], np.frombuffer(data, np.uint8).astype(int)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return encoded.tokens, np.array(encoded.ids, int)


def _tables(tables: list["Table"]) -> Iterator[str]:
    rows = [
        (
            "all" if table.layer is None else table.layer,
            table.columns,
            f"{table.rows:,}",
            _range(table.smallest, table.largest),
            "unknown" if table.nbytes is None else amount(table.nbytes),
        )
        for table in tables
    ]
    head = ["layer", "rows/token", "rows", "rows of a column", "size"]
    yield from columns(rows, head=head)


def _range(smallest: int, largest: int) -> str:
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def _rows(tokens: list[str], rows: dict[str, list[list[int]]]) -> Iterator[str]:
    from rich.cells import cell_len

    for layer, table in rows.items():
        yield f"rows of layer {layer}:" if layer != "None" else "rows:"
        shown = tokens[:SHOWN]
        widest = max(map(cell_len, shown), default=0)
        room = shutil.get_terminal_size().columns - widest - 2
        lines = []
        for token, row in zip(shown, table, strict=False):
            parts = textwrap.wrap(" ".join(map(str, row)), max(room, 1), **UNBROKEN)
            lines += zip([token, *[""] * len(parts)], parts, strict=False)
        yield from columns(lines)
        if len(tokens) > SHOWN:
            yield f"… and {len(tokens) - SHOWN:,} more tokens (--json has all)"


def _usage(used: list["Usage"]) -> Iterator[str]:
    rows = [
        (
            "all" if use.layer is None else use.layer,
            f"{use.tokens:,}",
            f"{use.distinct_rows:,}",
            f"{use.distinct_ngrams:,}",
            f"{100 * use.collision_share:.2f} %",
            "unknown" if use.pages is None else f"{use.pages / max(1, use.tokens):.2f}",
        )
        for use in used
    ]
    head = ["layer", "tokens", "different rows", "n-grams", "collide", "page-ins/token"]
    yield from columns(rows, head=head)
