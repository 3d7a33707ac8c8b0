"""``firstlayer neighbors``: nearest neighbors of a word or of a sum of words."""

import click

from ._output import COUNT, cli_command, columns, emit, say

EXAMPLES = """
firstlayer neighbors vectors TypeError lock
firstlayer neighbors vectors king - man + woman
firstlayer neighbors vectors "new york"
firstlayer neighbors glove.6B.50d.txt whale -n 5 --json
"""


@cli_command(examples=EXAMPLES)
@click.argument("table")
@click.argument("words", nargs=-1, required=True, metavar="WORD...")
@click.option(
    "-n",
    "--count",
    type=COUNT,
    default=10,
    show_default=True,
    help="Number of neighbors.",
)
def command(
    table: str, words: tuple[str, ...], count: int, as_json: bool, quiet: bool
) -> None:
    """List the words of TABLE nearest to each WORD, by cosine.

    TABLE is a folder with a table and a tokenizer (written by firstlayer train, model2vec
    or transformers), or a safetensors, PyTorch, GGUF, gensim, fastText, word2vec, GloVe,
    TSV, .npy, .npz or .parquet file; text may be compressed (.gz). Words joined by + or -
    form one query, and so does a quoted phrase. A word without a row of its own is the mean
    of its pieces, which is noted.
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
        for note in one.notes:
            say(note, quiet=quiet)
        if not one.found:
            say(f"{one.query} has no neighbors: no other row has a direction", quiet=quiet)
        rows = [(near.word, f"{near.cosine:.3f}") for near in one.found]
        lines += [one.query] if len(found) > 1 or " " in one.query else []
        lines += ["  " * (len(found) > 1) + line for line in columns(rows)]
    emit(found, lines, as_json=as_json)
