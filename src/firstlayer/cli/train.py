"""``firstlayer train``: learn token embeddings from text."""

import os
import shlex
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ._output import (
    columns,
    emit,
    force_option,
    free_to_write,
    progress,
    say,
    seed_option,
    verb,
)

if TYPE_CHECKING:
    from ..word_vectors.skipgram import Progress
    from ..word_vectors.train import Recipe, Trained

EXAMPLES = """
firstlayer train                                from Python's own source, in half a minute
firstlayer train book.txt -o book               from a file
firstlayer train *.txt --lower --window 5       topics more than grammar
cat *.md | firstlayer train - --tokenizer bpe --vocab 8000
firstlayer train --resume -o vectors            go on after Ctrl-C
"""
#: What may be said along with --resume; the rest was said in the first run.
WITH_RESUME = {"files", "output", "resume", "threads", "quiet", "as_json"}


@verb(examples=EXAMPLES)
@click.argument("files", nargs=-1, metavar="[FILES|-]...")
@click.option(
    "-o",
    "--output",
    default="vectors",
    show_default=True,
    metavar="FOLDER",
    help="Where the table is written.",
)
@click.option(
    "--tokenizer",
    type=click.Choice(["words", "bpe"]),
    default="words",
    show_default=True,
    help="Whole words, or pieces that spell any text and take about three times as long.",
)
@click.option(
    "--vocab",
    type=click.IntRange(min=2),
    default=30_000,
    show_default=True,
    help="How many words or pieces to have at most.",
)
@click.option(
    "--min-count",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How often a word must occur to be learned.",
)
@click.option("--lower", is_flag=True, help="Take capitals for small letters.")
@click.option(
    "--dim",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Width of a vector.",
)
@click.option(
    "--window",
    type=click.IntRange(1, 16),
    default=2,
    show_default=True,
    help="How many words away a neighbour may be.",
)
@click.option(
    "--negatives",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How many random words each neighbour is told apart from.",
)
@click.option(
    "--sample",
    type=click.FloatRange(min=0, min_open=True),
    default=1e-3,
    show_default=True,
    help="Leave out some of the words above this share of the text.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How often to go through the text.",
)
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    default=0.08,
    show_default=True,
    help="Learning rate at the beginning; it falls to nothing.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="How many places in the text to learn from at a time.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="How many to use; the result is the same for any.  [default: one a core]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with what Ctrl-C has left in FOLDER, from the same FILES.",
)
@seed_option
@force_option
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Learn token embeddings from text by skip-gram with negative sampling.

    Reads FILES of UTF-8 text (- is standard input; without any, the source of the running
    Python's standard library). Writes a FOLDER that model2vec and sentence-transformers
    open, and prints the neighbours of a few frequent words. The same seed gives the same
    table, bit for bit. Ctrl-C saves what has been learned; --resume goes on with it.
    """
    _check_resume(ctx, resume=options["resume"])
    if os.path.isdir(options["output"]) and os.listdir(options["output"]):
        free_to_write(options["output"], force=options["force"] or options["resume"])
    if options["threads"]:
        _use_threads(options["threads"])
    from ..word_vectors.train import train

    quiet = options["quiet"]
    with _asked_to_stop() as stop, progress("learning", total=1.0, quiet=quiet) as draw:
        found = train(
            options["files"],
            options["output"],
            recipe=None if options["resume"] else _recipe(options),
            replace=options["force"],
            tell=lambda what: say(what, quiet=quiet),
            report=lambda now: draw(now.done, note=_note(now)),
            stop=stop,
        )
    emit(found, _text(found), as_json=options["as_json"])
    if not found.finished:
        again = shlex.join(["--resume", *options["files"], "-o", found.folder])
        raise click.ClickException(
            f"interrupted at {found.progress.done:.0%}; go on with: firstlayer train {again}"
        )


def _check_resume(ctx: click.Context, *, resume: bool) -> None:
    for name in ctx.params:
        said = ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if resume and said and name not in WITH_RESUME:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"--resume goes on as it began: leave out {flag}", ctx)


def _use_threads(count: int) -> None:
    from .. import set_num_threads

    # What the tokenizers package looks at, before it is imported.
    os.environ["RAYON_NUM_THREADS"] = str(count)
    set_num_threads(count)


def _recipe(options: dict[str, Any]) -> "Recipe":
    from ..word_vectors.skipgram import Setting
    from ..word_vectors.train import Recipe

    setting = Setting(
        embedding_dim=options["dim"],
        **{name: options[name] for name in ("window", "negatives", "sample", "epochs")},
        **{name: options[name] for name in ("lr", "batch", "seed")},
    )
    return Recipe(
        kind=options["tokenizer"],
        size=options["vocab"],
        min_count=options["min_count"],
        lower=options["lower"],
        setting=setting,
    )


@contextmanager
def _asked_to_stop() -> Generator[Callable[[], bool], None, None]:
    """Yield whether Ctrl-C was pressed, for whoever can stop and save.

    Before anybody has asked, and when it is pressed again, it ends the program at once.
    """
    asked, waited_for = False, False

    def press(number: int, frame: Any) -> None:
        nonlocal asked
        if asked or not waited_for:
            raise KeyboardInterrupt
        asked = True

    def stop() -> bool:
        nonlocal waited_for
        waited_for = True
        return asked

    before = signal.signal(signal.SIGINT, press)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _note(now: "Progress") -> str:
    return f"{now.tokens_per_second:,.0f} tokens/s, loss {now.loss:.3f}"


def _text(found: "Trained") -> list[str]:
    done = found.progress
    summary = (
        f"{found.num_embeddings:,} × {found.embedding_dim} from {found.tokens:,} tokens "
        f"in {done.seconds:.1f} s ({done.tokens_per_second:,.0f} tokens/s), "
        f"loss {done.loss:.3f}, in {found.folder}"
    )
    rows = [
        (near.query, " ".join(f"{one.word} {one.cosine:.2f}" for one in near.found))
        for near in found.neighbors
    ]
    return [summary, *columns(rows)]
