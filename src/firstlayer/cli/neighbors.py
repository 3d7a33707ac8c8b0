"""``firstlayer neighbors``: the words nearest to a word or to a sum of words."""

import click

from ._output import columns, emit, verb

EXAMPLES = """
firstlayer neighbors vectors TypeError lock
firstlayer neighbors vectors king - man + woman
firstlayer neighbors glove.6B.50d.txt whale -n 5 --json
"""


@verb(examples=EXAMPLES)
@click.argument("table")
@click.argument("words", nargs=-1, required=True, metavar="WORD...")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How many to list.",
)
def command(
    table: str, words: tuple[str, ...], count: int, as_json: bool, quiet: bool
) -> None:
    """List the words of TABLE that are nearest to each WORD, by cosine.

    TABLE is a folder with a table and a tokenizer (firstlayer train's, model2vec's, a
    transformers checkpoint's), or a file of word2vec or GloVe. Words joined by + or -
    are one query: what is near their sum.
    """
    from ..word_vectors.neighbors import neighbors, parse
    from ..word_vectors.vectors import open_vectors

    try:
        queries = parse(words)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    found = neighbors(open_vectors(table), queries, count=count)
    lines = []
    for one in found:
        rows = [(near.word, f"{near.cosine:.3f}") for near in one.found]
        lines += [one.query] if len(found) > 1 or " " in one.query else []
        lines += ["  " * (len(found) > 1) + line for line in columns(rows)]
    emit(found, lines, as_json=as_json)
