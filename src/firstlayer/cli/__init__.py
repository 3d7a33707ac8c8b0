"""The command line: one file a verb, imported when it is chosen.

``firstlayer VERB …`` finds the verb's name in a table, so that ``firstlayer --help`` imports click
and nothing else. A verb's module holds one click command named ``command``; what it
measures or learns is in :mod:`firstlayer.analysis`, and the verb only reads arguments and prints.
Manners that every verb has (``--json``, ``-q``, one sentence for an error, exit codes) are
in ``_manners``.
"""

import sys
import warnings

#: Every verb, its module's name too, and what it does.
VERBS = {
    "train": "Learn token embeddings from text.",
    "neighbors": "List the words nearest to a word or to a sum of words.",
    "similarity": "Tell how alike words are.",
    "encode": "Turn lines of text into vectors.",
    "inspect": "Describe the embedding tables in a checkpoint.",
    "memory": "Count what a table costs to train and to keep.",
    "bench": "Time lookups beside other libraries.",
    "positions": "Compare position schemes on your text.",
}


def main() -> None:
    """Run the command line on the arguments of this process."""
    # Warnings are for who writes Python; -W and PYTHONWARNINGS still show them.
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
        sys.exit("firstlayer: interrupted")
