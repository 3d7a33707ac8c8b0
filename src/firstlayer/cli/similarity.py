"""``firstlayer similarity``: cosine similarity of words."""

import click

from ._output import cli_command, columns, emit, say

EXAMPLES = """
firstlayer similarity vectors TypeError ValueError
firstlayer similarity vectors red green blue lock
"""


@cli_command(examples=EXAMPLES)
@click.argument("table")
@click.argument("words", nargs=-1, required=True, metavar="WORD WORD...")
def command(table: str, words: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Print the cosine of two WORDs of TABLE, or a matrix for more than two.

    TABLE is a table as for firstlayer neighbors.
    """
    if len(words) < 2:
        raise click.UsageError(f"similarity takes at least two words, got {len(words)}")
    from ..word_vectors.neighbors import similarities
    from ..word_vectors.vectors import open_vectors

    found = similarities(open_vectors(table), words)
    cosines = found.cosines
    for note in found.notes:
        say(note, quiet=quiet)
    if len(words) == 2:
        lines = [f"{cosines[0, 1]:.3f}"]
    else:
        rows = [
            (word, *(f"{cosine:.3f}" for cosine in row))
            for word, row in zip(words, cosines, strict=True)
        ]
        lines = columns(rows, head=["", *words])
    emit(found, lines, as_json=as_json)
