"""``firstlayer train``: train token embeddings on text."""

import os
import shlex
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ._output import (
    COUNT,
    InterruptedCommand,
    Number,
    check_output_folder,
    cli_command,
    columns,
    emit,
    force_option,
    progress,
    say,
    seed_option,
    value_option,
)

if TYPE_CHECKING:
    from ..word_vectors.train import MoreEpochs, Trained, TrainingOptions
    from ..word_vectors.word2vec import Progress

EXAMPLES = r"""
firstlayer train                           on Python's own source code
firstlayer train book.txt -o book          on a file
firstlayer train *.txt --lower --window 2  narrow window: syntax, not topics
firstlayer train articles/ pages.jsonl.gz  a folder, JSON lines
firstlayer train zh.txt --pattern "\S+"    words between spaces
cat *.md | firstlayer train - --tokenizer bpe --vocab 8000
firstlayer train *.txt --buckets 200000    n-grams: vectors of unseen words
firstlayer train --resume -o vectors       resume after Ctrl-C
firstlayer train --keep-state              keep the state, to train further:
firstlayer train --resume --epochs 10      10 more epochs
"""
#: Headings of the help text.
SECTIONS = {
    "Text": "encoding text_field lines",
    "Vocabulary": "tokenizer vocab min_count lower pattern phrases phrase_threshold",
    "Training": "method dim window negatives sample epochs lr buckets min_n max_n batch "
    "threads seed",
    "Output": "output force resume keep_state save_every scratch",
}
#: Options allowed with --resume; all others come from the first run.
ALLOWED_WITH_RESUME = {"files", "output", "resume", "threads", "save_every", "quiet"}
ALLOWED_WITH_RESUME |= {"as_json", "scratch", "epochs", "lr"}


@cli_command(examples=EXAMPLES, sections=SECTIONS)
@click.argument("files", nargs=-1, metavar="[FILES|-]...")
@click.option(
    "-o",
    "--output",
    default="vectors",
    show_default=True,
    metavar="FOLDER",
    help="Output folder.",
)
@value_option(
    "--tokenizer",
    "words",
    "Whole words, or byte-pair encoding (about three times slower).",
    type=click.Choice(["words", "bpe"]),
)
@value_option("--vocab", 30_000, "Largest vocabulary size.", type=Number(int, 2))
@value_option("--min-count", 5, "Least number of occurrences of a word.", type=COUNT)
@click.option("--lower", is_flag=True, help="Lowercase the text.")
@click.option(
    "--pattern",
    metavar="REGEX",
    help="Regular expression of a word.  [default: letters, digits and _, with "
    "contractions such as don't; one character of Chinese, as in BERT, or Thai; a run of "
    "kana]",
)
@value_option(
    "--phrases",
    0,
    "Passes that join words often found together, such as new_york; each pass may double "
    "the length of phrases.",
    type=Number(int, 0),
    metavar="PASSES",
)
@value_option(
    "--phrase-threshold",
    10.0,
    "Least score of a phrase, as in gensim; a lower one joins more.",
    type=Number(float, 0),
)
@value_option("--encoding", "utf-8", "Encoding of FILES.", metavar="NAME")
@click.option(
    "--text-field",
    metavar="NAME",
    help="Read FILES as JSON lines with this field.  [default: text in .jsonl files]",
)
@click.option("--lines", is_flag=True, help="Each line is a document, not each file.")
@value_option(
    "--method",
    "skipgram",
    "Each context word predicts the center word, or (CBOW) their mean does.",
    type=click.Choice(["skipgram", "cbow"]),
)
@value_option("--dim", 128, "Width of each vector.", type=COUNT)
@value_option(
    "--window",
    5,
    "Largest distance of a context word, at most 16.",
    type=Number(int, 1, 16),
)
@value_option(
    "--negatives",
    5,
    "Negatives per center word, shared by its context words; at most 1000.",
    type=Number(int, 1, 1000),
)
@value_option(
    "--sample",
    1e-3,
    "Subsample words above this frequency.",
    type=Number(float, above=0),
)
@value_option("--epochs", 5, "Number of passes over the text.", type=COUNT)
@click.option(
    "--lr",
    help="Initial learning rate; it decays linearly.  [default: 0.05, 0.3 for cbow]",
    type=Number(float, above=0),
)
@value_option(
    "--buckets",
    0,
    "Rows of character n-grams, which give vectors to unseen words; 0 for none "
    "(fastText has 2,000,000).",
    type=Number(int, 0),
)
@value_option("--min-n", 3, "Shortest n-gram, with the brackets of <word>.", type=COUNT)
@value_option("--max-n", 6, "Longest n-gram, at most 64.", type=Number(int, 1, 64))
@value_option("--batch", 512, "Center words trained in parallel.", type=COUNT)
@click.option(
    "--threads",
    type=COUNT,
    help="Number of threads; the result does not depend on it.  [default: all cores]",
)
@value_option(
    "--save-every",
    5.0,
    "Minutes between saves, from which a killed run resumes.",
    type=Number(float, above=0),
    metavar="MINUTES",
)
@click.option(
    "--scratch",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Folder of temporary files, of about 12 bytes per token.  [default: that of the "
    "output]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the interrupted run in FOLDER, with the same FILES. With --epochs, train "
    "a finished one further.",
)
@click.option(
    "--keep-state",
    is_flag=True,
    help="Keep the state of the finished run in FOLDER, for --resume --epochs. It takes "
    "twice the size of the table.",
)
@seed_option
@force_option
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Train token embeddings on text with word2vec's skip-gram or CBOW.

    Reads FILES of text, and all text files in folders; .gz, .bz2 and .xz are decompressed,
    each line of .jsonl is a document, and - is standard input. The default is the source of
    Python's standard library. The text need not fit into memory. Writes a FOLDER that
    model2vec and sentence-transformers can open, and prints the neighbors of a few frequent
    words. The same seed gives the same table, bit for bit. The state is saved every few
    minutes and on Ctrl-C; to continue, use --resume. --resume --epochs N trains a run that
    was finished with --keep-state for N more epochs; the learning rate starts again from
    --lr and decays.
    """
    _check_resume(ctx, resume=options["resume"])
    check_output_folder(options["output"], force=options["force"] or options["resume"])
    if options["threads"]:
        _use_threads(options["threads"])
    from ..word_vectors.train import train

    quiet = options["quiet"]
    with _stop_on_interrupt() as stop, progress("training", total=1.0, quiet=quiet) as draw:
        trained = train(
            options["files"],
            options["output"],
            recipe=None if options["resume"] else _recipe(options),
            more=_more(ctx) if options["resume"] else None,
            replace=options["force"],
            tell=lambda what: say(what, quiet=quiet),
            report=lambda now: draw(now.done, note=_note(now)),
            report_reading=lambda share: draw(share, what="reading"),
            stop=stop,
            save_every=60 * options["save_every"],
            scratch=options["scratch"],
        )
    emit(trained, _text(trained), as_json=options["as_json"])
    if not trained.finished:
        again = shlex.join(["--resume", *options["files"], "-o", trained.folder])
        raise InterruptedCommand(
            f"interrupted at {trained.progress.done:.0%}; "
            f"resume with: firstlayer train {again}"
        )


def _check_resume(ctx: click.Context, *, resume: bool) -> None:
    for name in ctx.params:
        given = ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if resume and given and name not in ALLOWED_WITH_RESUME:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"--resume keeps the options of the first run: remove {flag}", ctx
            )


def _more(ctx: click.Context) -> "MoreEpochs | None":
    """Return the additional epochs that --epochs asks for."""
    from ..word_vectors.train import MoreEpochs

    if ctx.get_parameter_source("epochs") == ParameterSource.COMMANDLINE:
        return MoreEpochs(ctx.params["epochs"], ctx.params["lr"])
    if ctx.params["lr"] is not None:
        raise click.UsageError("--lr with --resume needs --epochs", ctx)
    return None


def _use_threads(count: int) -> None:
    from .. import set_num_threads

    # Read by the tokenizers package when it is imported.
    os.environ["RAYON_NUM_THREADS"] = str(count)
    set_num_threads(count)


def _recipe(options: dict[str, Any]) -> "TrainingOptions":
    from ..word_vectors.documents import ReadingOptions
    from ..word_vectors.train import TrainingOptions
    from ..word_vectors.word2vec import Word2VecOptions

    setting = Word2VecOptions(
        embedding_dim=options["dim"],
        **{name: options[name] for name in ("window", "negatives", "sample", "epochs")},
        **{name: options[name] for name in ("method", "lr", "batch", "seed")},
        **{name: options[name] for name in ("buckets", "min_n", "max_n")},
    )
    return TrainingOptions(
        kind=options["tokenizer"],
        size=options["vocab"],
        min_count=options["min_count"],
        lower=options["lower"],
        pattern=options["pattern"],
        phrases=options["phrases"],
        phrase_threshold=options["phrase_threshold"],
        reading=ReadingOptions(**{
            name: options[name] for name in ("encoding", "text_field", "lines")
        }),
        keep_state=options["keep_state"],
        setting=setting,
    )


@contextmanager
def _stop_on_interrupt() -> Generator[Callable[[], bool], None, None]:
    """Yield a function that returns whether Ctrl-C was pressed, so that state can be saved.

    Ctrl-C raises KeyboardInterrupt as usual before the first call of that function, and
    when it is pressed a second time.
    """
    is_pressed, is_polled = False, False

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal is_pressed
        if is_pressed or not is_polled:
            raise KeyboardInterrupt
        is_pressed = True

    def stop() -> bool:
        nonlocal is_polled
        is_polled = True
        return is_pressed

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def _note(now: "Progress") -> str:
    return f"{now.tokens_per_second:,.0f} tokens/s, loss {now.loss:.3f}"


def _text(trained: "Trained") -> list[str]:
    done = trained.progress
    summary = (
        f"{trained.num_embeddings:,} × {trained.embedding_dim} from "
        f"{trained.tokens:,} tokens in {done.seconds:.1f} s "
        f"({done.tokens_per_second:,.0f} tokens/s), loss {done.loss:.3f}, "
        f"in {trained.folder}"
    )
    rows = [
        (near.query, " ".join(f"{one.word} {one.cosine:.2f}" for one in near.found))
        for near in trained.neighbors
    ]
    return [summary, *columns(rows)]
