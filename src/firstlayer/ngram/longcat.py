"""The n-gram hash of LongCat-Flash-Lite."""

from dataclasses import dataclass

from .._check import number, positive
from .arguments import at_least, below
from .hashing import Hashing, Layout
from .scheme import Scheme, define


@dataclass(frozen=True, kw_only=True, eq=False)
class LongCatNgram(Scheme):
    """Rows of LongCat-Flash-Lite's n-gram tables, joined into one.

    An n-gram is a number whose digits in base ``vocab_size`` are its ids, reduced modulo
    an odd number of each table. It ends before an earlier EOS, and at dead or negative ids,
    which count as 0. The EOS at a position itself is hashed, as in sglang.

    Args:
        order: Number of ids in the longest n-gram: ``emb_neighbor_num``.
        splits: Number of rows for each n: ``emb_split_num``.
        ratio: Rows of a table per id: ``ngram_vocab_size_ratio``.
        vocab_size: Number of ids.
        eos: Id that ends n-grams, or None.

    Example:
        >>> scheme = LongCatNgram(order=3, splits=2, ratio=3, vocab_size=40, eos=2)
        >>> scheme.layout().sizes, scheme.layout().rows
        ((121, 123, 125, 127), 496)
        >>> scheme([5])[0].tolist()
        [5, 126, 249, 374]
    """

    order: int = 4
    splits: int = 4
    ratio: float = 78
    vocab_size: int = 131_072
    eos: int | None

    def __post_init__(self) -> None:
        order, splits = at_least("order", self.order, 2), positive("splits", self.splits)
        vocab_size = positive("vocab_size", self.vocab_size)
        if self.eos is not None:
            below("eos", self.eos, vocab_size, of="vocab_size")
        if not 1 / vocab_size <= number("ratio", self.ratio) < 2**31:
            raise ValueError(
                f"ratio must give a table at least one row for vocab_size {vocab_size}, "
                f"got {self.ratio}"
            )
        first = int(self.ratio * vocab_size) + 1
        sizes = [first + 2 * i for i in range((order - 1) * splits)]
        if vocab_size * sizes[-1] * order >= 2**63:
            raise ValueError(
                "ratio and vocab_size must keep sums below 2**63, "
                f"got {self.ratio} and {vocab_size}"
            )
        multipliers = [
            tuple(pow(vocab_size, s, size) * (s < i // splits + 2) for s in range(order))
            for i, size in enumerate(sizes)
        ]
        hashing = Hashing(span=order, bound=("vocab_size", vocab_size), stop=self.eos)
        define(self, {None: Layout.of(sizes, multipliers)}, hashing)
