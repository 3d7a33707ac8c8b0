"""The n-gram hash of Qwen3.8-Flash-Next (``qwen4_exp``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from .._check import not_negative, positive
from ..embeddings.hashed import splitmix64
from .arguments import at_least, below, distinct, integer_tuple, set_argument
from .hashing import Hashing, Layout
from .primes import next_prime
from .scheme import Scheme, define

#: Added to the seed for each layer.
_LAYER_SEED = 10007
#: Distance of the states of SplitMix64.
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, eq=False)
class QwenNgram(Scheme):
    """Rows of Qwen's n-gram table (``qwen4_exp``, Qwen3.8-Flash-Next).

    For each n from 2 to ``order``, the last n ids are multiplied by odd numbers, combined
    by xor, and reduced modulo ``heads`` primes. An n-gram ends at an earlier EOS: it, older
    ids, and ids before the start or in another document read as EOS. A dead or negative id
    is EOS, as padding is in transformers. Images are not dead in this model: their
    placeholder ids are hashed.

    Args:
        order: Number of ids in the longest n-gram.
        heads: Number of rows for each n.
        base: Lower bound of the primes.
        layers: Layers with a table, as ``ple_layer_ids`` numbers them, from 1.
        vocab_size: Number of ids. It determines the multipliers.
        eos: Id that ends n-grams.
        seed: Seed of the multipliers, together with the place of the layer in ``layers``.
        multiple_of: The number of rows of a table is rounded up to a multiple of this.

    Example:
        >>> scheme = QwenNgram(order=3, heads=2, base=97, vocab_size=100, eos=9)
        >>> scheme.layout().sizes, scheme.layout().rows
        ((97, 101, 103, 107), 512)
        >>> rows = scheme([5, 9, 7, 8])
        >>> bool((rows[2:] == scheme([7, 8])).all())
        True
    """

    order: int = 3
    heads: int = 8
    base: int = 20_000_000
    layers: Sequence[int] = (2,)
    vocab_size: int
    eos: int
    seed: int = 1234
    multiple_of: int = 128

    def __post_init__(self) -> None:
        order, heads = at_least("order", self.order, 2), positive("heads", self.heads)
        layers = distinct("layers", integer_tuple("layers", self.layers, at_least=1))
        set_argument(self, "layers", tuple(sorted(layers)))
        below("eos", self.eos, positive("vocab_size", self.vocab_size), of="vocab_size")
        not_negative("seed", self.seed)
        multiple_of = positive("multiple_of", self.multiple_of)
        primes = _primes_from(at_least("base", self.base, 2))
        layouts: dict[int | None, Layout] = {}
        for place, layer in enumerate(self.layers):
            sizes = list(islice(primes, (order - 1) * heads))
            multipliers = _multipliers(self.vocab_size, order, self.seed, place)
            layouts[layer] = Layout.of(sizes, multipliers, multiple_of=multiple_of)
        hashing = Hashing(
            span=order,
            bound=("vocab_size", self.vocab_size),
            fill=self.eos,
            stop=self.eos,
            negative="fill",
            heads=heads,
        )
        define(self, layouts, hashing)


def _primes_from(base: int):
    prime = base - 1
    while True:
        prime = next_prime(prime)
        yield prime


def _multipliers(vocab_size: int, order: int, seed: int, place: int) -> list[int]:
    half = max(1, ((2**63 - 1) // vocab_size) // 2)
    start = seed + _LAYER_SEED * place
    draws = (splitmix64(start + (s + 1) * _GAMMA) % half for s in range(order))
    return [2 * draw + 1 for draw in draws]
