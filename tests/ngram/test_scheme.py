"""Properties of all n-gram schemes: windows, history, documents, dead ids, libraries."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlayer.ngram import ByteGroups, Engram, LongCatNgram, QwenNgram, SaltedNgram
from tests.support.ngram import (
    LIBRARIES,
    NUM_IDS,
    advanced_in,
    canonical_map,
    last_layer,
    reference_rows,
    rows_in,
    schemes,
)

ONE_OF_EACH = [
    Engram(order=4, heads=3, base=999, layers=(1, 7), canonical=canonical_map(1), pad=5),
    Engram(
        order=3,
        heads=2,
        base=[50, 700],
        layers=(3,),
        canonical=canonical_map(2),
        pad=1,
        seed=4,
        bits=32,
        hash_negative=True,
    ),
    QwenNgram(order=3, heads=2, base=97, layers=(2, 4), vocab_size=NUM_IDS, eos=3, seed=7),
    LongCatNgram(order=3, splits=2, ratio=2.5, vocab_size=NUM_IDS, eos=2),
    ByteGroups(sizes=(1, 3, 8), rows=601, functions=2),
    SaltedNgram(orders=(1, 2, 4), salts=3, rows=1000),
]
by_name = pytest.mark.parametrize("scheme", ONE_OF_EACH, ids=lambda s: type(s).__name__)


def few(length: int = 14):
    """Return a strategy of short sequences of few ids, so that n-grams repeat."""
    return st.lists(st.integers(0, 4), min_size=1, max_size=length)


def batch(seed: int) -> dict[str, np.ndarray]:
    """Return ids of two sequences with history, documents and dead places."""
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, 6, (2, 15)),
        "history": rng.integers(0, 6, (2, 2)),
        "documents": np.sort(rng.integers(3, 7, (2, 17))),
        "dead": rng.random((2, 15)) < 0.2,
    }


@settings(max_examples=150)
@given(schemes(), few(), st.data())
def test_rows_are_those_of_the_formula(scheme, ids, data):
    size, layer = len(ids), last_layer(scheme)
    documents = data.draw(
        st.none() | st.lists(st.integers(0, 2), min_size=size, max_size=size)
    )
    dead = data.draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size))
    ids = [data.draw(st.sampled_from([i, i, i, -1, -2])) for i in ids]
    found = scheme(ids, layer=layer, documents=documents, dead=dead)
    expected = reference_rows(scheme, ids, layer=layer, documents=documents, dead=dead)
    assert found.tolist() == expected


@settings(max_examples=150)
@given(schemes(), few(length=20), st.data())
def test_chunks_and_steps_give_the_rows_of_one_pass(scheme, ids, data):
    size, layer = len(ids), last_layer(scheme)
    documents = np.sort(
        data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    )
    dead = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    whole = scheme(ids, layer=layer, documents=documents, dead=dead)
    history, start, chunks = None, 0, []
    while start < size:
        end = data.draw(st.integers(start + 1, size))
        given_ids = 0 if history is None else min(start, scheme.history_length)
        past = history if history is None else history[history.size - given_ids :]
        chunks.append(
            scheme(
                ids[start:end],
                layer=layer,
                history=past,
                documents=documents[start - given_ids : end],
                dead=dead[start:end],
            )
        )
        history = scheme.advance(past, ids[start:end], dead=dead[start:end])
        assert history.shape == (scheme.history_length,)
        start = end
    assert np.concatenate(chunks).tolist() == whole.tolist()


@settings(max_examples=50)
@given(schemes(), few(), st.lists(st.integers(0, 4), max_size=6), st.data())
def test_a_draft_of_which_a_prefix_was_accepted_leaves_no_trace(scheme, ids, draft, data):
    accepted = data.draw(st.integers(0, len(draft)))
    history = scheme.advance(None, ids)
    after = scheme.advance(history, np.array([draft], int)[0], accepted=accepted)
    kept = [*ids, *draft[:accepted]]
    assert after.tolist() == scheme.advance(None, kept).tolist()
    following = scheme([*kept, 1], layer=last_layer(scheme))[-1:]
    assert (scheme([1], layer=last_layer(scheme), history=after) == following).all()


@by_name
def test_accepted_may_differ_by_sequence(scheme):
    ids, accepted = batch(3)["ids"], np.array([0, 9])
    history = batch(4)["history"][:, : scheme.history_length]
    found = scheme.advance(history, ids, accepted=accepted)
    for row in range(2):
        one = scheme.advance(history[row], ids[row], accepted=int(accepted[row]))
        assert found[row].tolist() == one.tolist()
    tensors = map(torch.tensor, (history, ids))
    assert np.array_equal(scheme.advance(history, ids, accepted=accepted.tolist()), found)
    in_torch = scheme.advance(*tensors, accepted=torch.tensor(accepted))
    advance = jax.jit(lambda h, i, n: scheme.advance(h, i, accepted=n))
    in_jax = advance(jnp.asarray(history), jnp.asarray(ids), jnp.asarray(accepted))
    assert in_torch.tolist() == in_jax.tolist() == found.tolist()


@settings(max_examples=60)
@given(schemes(), few(), few())
def test_a_packed_document_has_the_rows_it_has_alone(scheme, first, second):
    layer, documents = last_layer(scheme), [4] * len(first) + [0] * len(second)
    packed = scheme(first + second, layer=layer, documents=documents)
    alone = [scheme(first, layer=layer), scheme(second, layer=layer)]
    assert packed.tolist() == np.concatenate(alone).tolist()


@settings(max_examples=60)
@given(schemes(), few(), few(), few())
def test_an_ngram_does_not_cross_a_dead_place(scheme, first, other, second):
    layer = last_layer(scheme)
    rows = [
        scheme(
            [*before, 0, *second],
            layer=layer,
            dead=[False] * len(before) + [True] + [False] * len(second),
        )
        for before in (first, other)
    ]
    after = len(second)
    assert rows[0][-after:].tolist() == rows[1][-after:].tolist()
    assert rows[0][-after:].tolist() == scheme(second, layer=layer).tolist()


@settings(max_examples=60)
@given(schemes(), few(), few(), few(length=8))
def test_equal_ngrams_give_equal_rows(scheme, first, other, ids):
    ids, layer = [*ids, *range(scheme.history_length + 1)], last_layer(scheme)
    rows = [scheme([*before, *ids], layer=layer)[-1] for before in (first, other)]
    assert rows[0].tolist() == rows[1].tolist()


@settings(max_examples=60)
@given(schemes(), few())
def test_rows_are_in_the_range_of_their_column(scheme, ids):
    layout = scheme.layout(last_layer(scheme))
    rows = scheme(ids, layer=last_layer(scheme))
    local = rows - np.array(layout.offsets)
    assert rows.shape == (len(ids), scheme.columns)
    assert local.min() >= 0 and (local < np.array(layout.sizes)).all()
    assert rows.max() < layout.rows
    is_joined = not isinstance(scheme, SaltedNgram)
    ends = np.array(layout.offsets) + np.array(layout.sizes)
    assert not is_joined or ends[:-1].tolist() == list(layout.offsets[1:])


@pytest.mark.parametrize(
    "scheme",
    [
        Engram(order=3, heads=3, base=61, layers=(4,), canonical=np.arange(4000), pad=1),
        Engram(order=3, heads=3, base=61, canonical=np.arange(4000), layers=(4,), bits=32),
        QwenNgram(order=3, heads=3, base=61, vocab_size=4000, eos=3),
        LongCatNgram(order=3, splits=3, ratio=0.015, vocab_size=4000, eos=3),
        ByteGroups(sizes=(3, 5), rows=61, functions=4),
        SaltedNgram(orders=(2, 3), salts=4, rows=61),
    ],
    ids=lambda s: type(s).__name__,
)
def test_rows_are_uniform_in_every_library(scheme):
    ids, layout = np.random.default_rng(5).integers(4, 4000, (1, 60_000)), scheme.layout()
    for library in LIBRARIES:
        rows = rows_in(library, scheme, ids)[0]
        for c, size in enumerate(layout.sizes):
            counts = np.bincount(rows[:, c] - layout.offsets[c], minlength=size)
            expected = ids.size / size
            chi_square = ((counts - expected) ** 2 / expected).sum()
            # Six standard deviations of the chi-square distribution.
            assert abs(chi_square - (size - 1)) < 6 * np.sqrt(2 * size), (library, c)


# Each example of JAX is compiled.
@pytest.mark.parametrize(
    ("library", "examples"), [("torch", 40), ("torch operators", 20), ("jax", 5)]
)
def test_the_properties_of_random_schemes_hold_in_every_library(library, examples):
    @settings(max_examples=examples)
    @given(schemes(), st.data())
    def check(scheme, data):
        span, layer = scheme.history_length + 1, last_layer(scheme)
        first, other, ids = (
            data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
            for size in (4, 4, span + 3)
        )
        alone = rows_in(library, scheme, [ids], layer=layer)[0]
        # Two packed sequences, two with a dead place before the ids, two with neither.
        documents, dead = np.full((6, 4 + len(ids)), 7), np.zeros((6, 4 + len(ids)), bool)
        documents[:2, :4], dead[2:4, 3] = 8, True
        rows = rows_in(
            library,
            scheme,
            [[*first, *ids], [*other, *ids]] * 3,
            layer=layer,
            documents=documents,
            dead=dead,
        )[:, 4:]
        for blocked in rows[:4]:
            assert blocked.tolist() == alone.tolist()
        for same in rows[4:, span - 1 :]:
            assert same.tolist() == alone[span - 1 :].tolist()
        # Chunks, the second of several ids and the others of one.
        ends = [*((1, 3) if library == "jax" else range(2, len(ids))), len(ids)]
        history, start, chunks = None, 0, []
        for end in ends:
            chunk = np.array([ids[start:end]])
            chunks.append(rows_in(library, scheme, chunk, layer=layer, history=history)[0])
            history, start = advanced_in(library, scheme, history, chunk), end
        assert np.concatenate(chunks).tolist() == alone.tolist()

    check()


@by_name
@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_every_library_gives_the_rows_of_numpy(scheme, library):
    arrays = batch(0)
    arrays["history"] = arrays["history"][:, : scheme.history_length]
    arrays["dead"][0, 0] = True
    arrays["ids"][1, 3] = -1
    layer = last_layer(scheme)
    expected = rows_in("numpy", scheme, layer=layer, **arrays)
    assert (rows_in(library, scheme, layer=layer, **arrays) == expected).all()
    arrays["ids"] = arrays["ids"].astype(np.int32)
    arrays["documents"] = arrays["documents"][:, 2:]
    assert (
        rows_in(library, scheme, layer=layer, **arrays)
        == rows_in("numpy", scheme, layer=layer, **arrays)
    ).all()


@by_name
def test_torch_compiles_a_scheme_into_one_graph(scheme):
    layer, arrays = last_layer(scheme), batch(1)

    @torch.compile(fullgraph=True, backend="eager")
    def rows(ids, documents, dead):
        return scheme(ids, layer=layer, documents=documents, dead=dead)

    names = "ids", "documents", "dead"
    arrays["documents"] = arrays["documents"][:, 2:]
    found = rows(*(torch.tensor(arrays[name]) for name in names))
    expected = scheme(layer=layer, **{name: arrays[name] for name in names})
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "build",
    [
        lambda n: Engram(
            order=3 + n, base=50 + 9 * n, layers=(n,), canonical=canonical_map(n), seed=n
        ),
        lambda n: QwenNgram(order=2 + n, base=50 + 9 * n, vocab_size=40 + n, eos=n, seed=n),
        lambda n: ByteGroups(rows=100 + n, functions=1 + n),
    ],
    ids=["Engram", "QwenNgram", "ByteGroups"],
)
def test_torch_compiles_several_schemes_with_one_function(build):
    # The compiler makes numbers that differ between calls variables of the graph.
    torch.compiler.reset()
    compiled = torch.compile(lambda s, x: s(x), fullgraph=True, backend="eager")
    for n in range(3):
        scheme, ids = build(n), torch.tensor(batch(n)["ids"])[:, : 9 + n]
        assert compiled(scheme, ids).tolist() == scheme(ids).tolist()


@by_name
def test_jax_maps_and_scans_a_scheme(scheme):
    layer, ids = last_layer(scheme), batch(2)["ids"]
    whole = scheme(ids, layer=layer)
    mapped = jax.vmap(lambda x: scheme(x, layer=layer))(jnp.asarray(ids))
    assert mapped.tolist() == whole.tolist()

    def step(history, token):
        rows = scheme(token[:, None], layer=layer, history=history)
        return scheme.advance(history, token[:, None]), rows[:, 0]

    start = scheme.advance(None, jnp.zeros((2, 0), jnp.int32))
    _, rows = jax.lax.scan(step, start, jnp.asarray(ids).T)
    assert np.swapaxes(rows, 0, 1).tolist() == whole.tolist()


def test_jax_rows_are_int64_with_x64():
    scheme = SaltedNgram(rows=2**33)
    ids = np.random.default_rng(0).integers(0, 2**20, 50)
    with pytest.raises(ValueError, match="a table of 8589934592 rows needs jax.config"):
        scheme(jnp.asarray(ids, jnp.int32))
    with jax.enable_x64(True):
        rows = scheme(jnp.asarray(ids))
    assert rows.dtype == np.int64 and (np.asarray(rows) == scheme(ids)).all()


@by_name
def test_empty_input_gives_no_rows(scheme):
    layer = last_layer(scheme)
    for shape in ((0,), (3, 0), (0, 4)):
        assert scheme(np.zeros(shape, int), layer=layer).shape == (*shape, scheme.columns)
        history = scheme.advance(None, np.zeros(shape, int))
        assert history.shape == (*shape[:-1], scheme.history_length)
        assert (history < 0).all()


@by_name
def test_a_scheme_is_a_value(scheme):
    for other in (copy.deepcopy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert other == scheme and hash(other) == hash(scheme)
        ids = batch(6)["ids"]
        layer = last_layer(scheme)
        assert (other(ids, layer=layer) == scheme(ids, layer=layer)).all()
    assert [s == scheme for s in ONE_OF_EACH].count(True) == 1
    with pytest.raises(AttributeError, match="cannot assign to field"):
        scheme.columns_of_mine = 3


@pytest.mark.parametrize("scheme", ONE_OF_EACH[:4], ids=lambda s: type(s).__name__)
def test_an_id_out_of_range_gives_no_row_under_tracing(scheme):
    ids = np.array([[1, NUM_IDS, 4, 5, 6, 7, 8]])
    layer = last_layer(scheme)
    for library in ("torch operators", "jax"):
        rows = rows_in(library, scheme, ids, layer=layer)
        read = slice(1, 2 + scheme.history_length)
        assert (rows[:, read] == -1).all()
        rest = rows_in("numpy", scheme, np.where(ids == NUM_IDS, 0, ids), layer=layer)
        assert (rows[:, :1] == rest[:, :1]).all()
        assert (rows[:, read.stop :] == rest[:, read.stop :]).all()


@pytest.mark.rejects
@pytest.mark.parametrize("scheme", ONE_OF_EACH[:4], ids=lambda s: type(s).__name__)
def test_an_id_out_of_range_is_an_error(scheme):
    layer, bound = last_layer(scheme), r"(vocab_size|the number of canonical ids) is 40"
    ids = [[1, 2], [3, 50]]
    with pytest.raises(IndexError, match=rf"^ids\[1, 1\] is 50, but {bound}"):
        scheme(ids, layer=layer)
    with pytest.raises(IndexError, match=rf"^ids\[1, 1\] is 50, but {bound}"):
        scheme(torch.tensor(ids), layer=layer)
    with pytest.raises(IndexError, match=rf"^ids\[1, 1\] is 50, but {bound}"):
        scheme(jnp.array(ids), layer=layer)
    with pytest.raises(IndexError, match=rf"^history\[0\] is 40, but {bound}"):
        scheme([1], layer=layer, history=[40])


LONGCAT = LongCatNgram(order=3, vocab_size=40, eos=None)


@pytest.mark.rejects
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda s: s([1.5]), TypeError, "ids must be integers, got float64"),
        (lambda s: s(torch.ones(2)), TypeError, "ids must be integers, got torch.float32"),
        (lambda s: s(jnp.ones(2)), TypeError, "ids must be integers, got float32"),
        (lambda s: s(7), TypeError, "ids must be integers, got int"),
        (lambda s: s(np.int64(7)), ValueError, "ids must have an axis of positions, got"),
        (lambda s: s([1], layer=3), ValueError, "layer must be None, got 3"),
        (
            lambda s: s([1], history=[1, 2, 3]),
            ValueError,
            "history must have at most 2 ids, got 3",
        ),
        (
            lambda s: s([[1]], history=[1]),
            ValueError,
            r"history must have the leading axes of ids, \(1,\), got shape \(1,\)",
        ),
        (
            lambda s: s([1, 2], documents=[1]),
            ValueError,
            r"documents must have shape \(2,\), got \(1,\)",
        ),
        (
            lambda s: s([1, 2], history=[3], dead=[True]),
            ValueError,
            r"dead must have shape \(2,\) or \(3,\), got \(1,\)",
        ),
        (
            lambda s: s.advance(None, [1, 2], accepted=3),
            ValueError,
            "accepted must be between 0 and 2, got 3",
        ),
        (
            lambda s: s.advance(None, [[1, 2]], accepted=np.array([-1])),
            ValueError,
            "accepted must be between 0 and 2, got -1",
        ),
        (
            lambda s: s.advance(None, [[1, 2]], accepted=np.array([1, 1])),
            ValueError,
            r"accepted must have the leading axes of ids, \(1,\), got shape \(2,\)",
        ),
        (
            lambda s: s.advance(None, [1, 2], accepted=1.0),
            TypeError,
            "accepted must be an integer, got float",
        ),
        (
            lambda s: s.advance(None, [[1, 2]], accepted=np.array([1.5])),
            TypeError,
            "accepted must be integers, got float64",
        ),
        (
            lambda s: s.advance(None, [1, 2], dead=[True]),
            ValueError,
            r"dead must have shape \(2,\), got \(1,\)",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call(LONGCAT)


@pytest.mark.rejects
def test_layer_must_be_given_if_there_are_several():
    with pytest.raises(ValueError, match="^layer must be one of 1, 7, got None"):
        ONE_OF_EACH[0]([1])
    with pytest.raises(ValueError, match="^layer must be one of 1, 7, got 2"):
        ONE_OF_EACH[0].layout(2)
