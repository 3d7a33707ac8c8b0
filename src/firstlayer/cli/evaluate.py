"""``firstlayer evaluate``: word vectors against human judgments."""

import click

from ._output import cli_command, columns, emit

EXAMPLES = """
firstlayer evaluate vectors wordsim353.tsv simlex999.txt
firstlayer evaluate vectors questions-words.txt --json
"""


@cli_command(examples=EXAMPLES)
@click.argument("table")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def command(table: str, files: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Evaluate the words of TABLE on similarity and analogy FILEs.

    A similarity file has two words and a score per line; the result is Spearman's rank
    correlation with the cosines. An analogy file has four words per line, with sections
    after a colon; the result is the share of correct answers. Lines with an unknown word
    are skipped. TABLE is a table as for firstlayer neighbors.
    """
    from ..word_vectors.evaluate import evaluate
    from ..word_vectors.vectors import open_vectors

    vectors = open_vectors(table)
    found = [evaluate(vectors, file) for file in files]
    rows = [
        (one.file, one.measure, f"{one.score:.3f}", f"{one.used:,} of {one.total:,} lines")
        for one in found
    ]
    emit(found, columns(rows), as_json=as_json)
