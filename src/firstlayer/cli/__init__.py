"""The command line: one file per command, imported when the command runs.

``firstlayer --help`` imports only click. Each module holds one click command named
``command``, which parses arguments and prints; the work is done in
:mod:`firstlayer.word_vectors`, :mod:`firstlayer.analysis` and :mod:`firstlayer.stores`.
Shared options and output (``--json``, ``-q``, progress) are in ``_output``; error messages
and exit codes in ``_group``.
"""

import sys
import warnings

#: Exit code after Ctrl-C, as in shells: 128 plus the number of the signal.
INTERRUPTED = 130
#: Commands, by the name of their module, with their summaries.
COMMANDS = {
    "train": "Train token embeddings on text.",
    "neighbors": "List the words nearest to a word or to a sum of words.",
    "similarity": "Print the cosine similarity of words.",
    "evaluate": "Score a table on similarity and analogy files.",
    "map": "Draw a table as a map in an HTML page.",
    "encode": "Encode lines of text as vectors.",
    "inspect": "Describe the embedding tables in a checkpoint.",
    "convert": "Write a table in another format.",
    "memory": "Measure the memory of training a table.",
    "ngram": "Describe n-gram tables, and how a text uses them.",
    "bench": "Time lookups against other libraries.",
    "warmup": "Compile the kernels, so that processes start fast.",
    "positions": "Compare position schemes on your text.",
}


def main() -> None:
    """Run the command line on the arguments of this process."""
    # Warnings address Python programmers; -W and PYTHONWARNINGS still show them.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    try:
        from ._group import firstlayer

        firstlayer(prog_name="firstlayer")
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("firstlayer: the command line needs click: pip install 'firstlayer[cli]'")
    except KeyboardInterrupt:
        sys.stderr.write("firstlayer: interrupted\n")
        sys.exit(INTERRUPTED)
