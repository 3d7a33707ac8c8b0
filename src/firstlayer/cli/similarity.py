"""``firstlayer similarity``: how alike words are."""

import click

from ._output import columns, emit, verb

EXAMPLES = """
firstlayer similarity vectors TypeError ValueError
firstlayer similarity vectors red green blue lock
"""


@verb(examples=EXAMPLES)
@click.argument("table")
@click.argument("words", nargs=-1, required=True, metavar="WORD WORD...")
def command(table: str, words: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Tell the cosine between WORDs of TABLE: one number for two, else one for each pair.

    TABLE is what firstlayer neighbors takes.
    """
    if len(words) < 2:
        raise click.UsageError(f"similarity takes at least two words, got {len(words)}")
    from ..word_vectors.neighbors import similarities
    from ..word_vectors.vectors import open_vectors

    cosines = similarities(open_vectors(table), words)
    if len(words) == 2:
        lines = [f"{cosines[0, 1]:.3f}"]
    else:
        rows = [
            (word, *(f"{cosine:.3f}" for cosine in row))
            for word, row in zip(words, cosines, strict=True)
        ]
        lines = columns(rows, head=["", *words])
    emit({"words": words, "cosines": cosines}, lines, as_json=as_json)
