"""Skip-gram and CBOW equal their definition, with the same bits for any thread count."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from firstlayer import kernels
from firstlayer.kernels.word2vec.step import MAX_SUM
from firstlayer.kernels.word2vec.word_rows import WordRows
from firstlayer.kernels.word2vec.workspace import PART
from firstlayer.vector_files.table import Subwords, bracketed
from firstlayer.word_vectors.corpus import learn_tokenizer, tokenized
from firstlayer.word_vectors.word2vec import Word2Vec, Word2VecOptions, kept_share

rng = np.random.default_rng(0)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


def step(stream, documents, tables=None, *, places=None, window=3, negatives=4, **options):
    """Train copies of tables; return them, the drawn words by position, and the loss."""
    words = stream.max() + 1
    if tables is None:
        tables = np.zeros((2, words, 2), np.float32)
    elif isinstance(tables, np.ndarray):
        tables = tables.copy()
    places = range(stream.size) if places is None else places
    work = kernels.word2vec_workspace(
        len(places),
        num_embeddings=words,
        embedding_dim=tables[0].shape[1],
        window=window,
        negatives=negatives,
        buckets=options.pop("buckets", 0),
    )
    loss = kernels.word2vec_step(
        tables[0],
        tables[1],
        stream.astype(np.int32),
        np.asarray(documents, np.int32),
        places,
        noise=kernels.noise_table(options.pop("shares", np.ones(words))),
        workspace=work,
        **{"key": 7, "lr": 0.0, **options},
    )
    drawn = []
    for i in range(len(places)):
        part, i = divmod(i, PART)
        near = work.near[part, i, : work.sizes[part, i]]
        drawn.append((
            work.inputs.ids[part, near],
            work.outputs.ids[part, work.far[part, i, : negatives + 1]],
        ))
    return tables, drawn, loss


def test_context_words_are_within_reach_in_the_same_document():
    stream, documents = np.arange(3000), np.repeat([0, 1, 2], 1000)
    _, drawn, _ = step(stream, documents, window=4)
    reaches = []
    for place, (found, targets) in enumerate(drawn):
        assert targets[0] == place
        reach = abs(found - place).max()
        reaches.append(reach)
        lo, hi = place // 1000 * 1000, place // 1000 * 1000 + 1000
        whole = [p for p in range(place - reach, place + reach + 1) if lo <= p < hi]
        assert found.tolist() == [p for p in whole if p != place]
    # Except at the ends of documents, every reach has the same probability.
    counts = np.bincount(reaches)[1:]
    assert counts.size == 4 and np.abs(counts / 3000 - 0.25).max() < 0.04


def test_every_center_word_has_its_own_negatives_of_their_distribution():
    stream = np.tile(np.arange(7), 3000)
    shares = np.array([5.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.001])
    _, drawn, _ = step(stream, np.zeros_like(stream), window=1, negatives=9, shares=shares)
    noise = np.array([targets[1:] for _, targets in drawn])
    assert noise.shape == (21_000, 9) and len(np.unique(noise, axis=0)) > 2000
    counts = np.bincount(noise.ravel(), minlength=7)
    np.testing.assert_allclose(counts / counts.sum(), shares / shares.sum(), atol=4e-3)
    assert counts[[1, 3, 4]].sum() == 0 and counts[6] > 0


def test_draws_depend_only_on_position_and_key(threads):
    stream, documents = rng.integers(0, 50, 5000), np.zeros(5000, int)
    _, whole, _ = step(stream, documents)
    _, part, _ = step(stream, documents, places=range(1001, 1100))
    _, other, _ = step(stream, documents, key=8)
    for i, place in enumerate(range(1001, 1100)):
        for got, want in zip(part[i], whole[place], strict=True):
            assert got.tolist() == want.tolist()
    same = [a[1].tolist() == b[1].tolist() for a, b in zip(whole, other, strict=True)]
    assert np.mean(same) < 0.01


def position_loss(tables, near, targets, *, cbow=False):
    """Return the loss of one position; negatives equal to the center word are skipped."""
    inputs = tables[0][near].mean(0, keepdim=True) if cbow else tables[0][near]
    dots = inputs @ tables[1][targets].T
    kept = torch.from_numpy(np.append(True, targets[1:] != targets[0]))
    signs = torch.where(torch.arange(len(targets)) == 0, 1.0, -1.0).double()
    return -(torch.nn.functional.logsigmoid(dots * signs) * kept).sum()


def part_changes(start, drawn, lr, *, cbow):
    """Yield how gradient descent on each part changes tables, and the words it changes."""
    for first in range(0, len(drawn), PART):
        own, touched = [table.clone().requires_grad_() for table in start], (set(), set())
        for near, targets in drawn[first : first + PART]:
            touched[0].update(near.tolist())
            touched[1].update(targets.tolist())
            loss = position_loss(own, near, targets, cbow=cbow)
            with torch.no_grad():
                for table, gradient in zip(
                    own, torch.autograd.grad(loss, own), strict=True
                ):
                    table -= lr * gradient
        yield [(new - old).detach() for new, old in zip(own, start, strict=True)], touched


def reference(tables, drawn, lr, *, cbow=False):
    """Return tables after gradient descent in each part, and the changes put together."""
    start = [torch.tensor(table, dtype=torch.float64) for table in tables]
    totals = [torch.zeros_like(table) for table in start]
    counts = [torch.zeros(len(table), 1) for table in start]
    for changes, touched in part_changes(start, drawn, lr, cbow=cbow):
        for side in (0, 1):
            totals[side] += changes[side]
            counts[side][list(touched[side])] += 1
    scales = [(float(MAX_SUM) / count.clamp(1)).clamp(max=1) for count in counts]
    return [(t + s * c).numpy() for t, s, c in zip(start, scales, totals, strict=True)]


@pytest.mark.parametrize(
    ("width", "negatives", "cbow"),
    [(20, 4, False), (16, 5, True), (33, 7, False), (24, 13, True)],
)
def test_step_is_gradient_descent_in_each_part(threads, width, negatives, cbow):
    # Some words occur in all six parts, others in one.
    stream = np.minimum(rng.geometric(0.02, 6 * PART - 5), 399)
    documents = np.arange(stream.size) // 50
    tables = rng.standard_normal((2, stream.max() + 1, width)).astype(np.float32) / 2
    options = {"negatives": negatives, "window": 2, "lr": 0.1, "cbow": cbow}
    got, drawn, (loss, count) = step(stream, documents, tables, **options)
    for new, want in zip(got, reference(tables, drawn, 0.1, cbow=cbow), strict=True):
        np.testing.assert_allclose(new, want, atol=2e-4)
    assert np.abs(got - tables).max() > 0.1
    assert 0.1 < loss / count / (negatives + 1) < 1.5


@pytest.mark.parametrize("cbow", [False, True])
def test_update_is_the_gradient_by_finite_differences(cbow):
    stream = np.array([1, 2, 3, 4, 2, 5])
    tables = rng.standard_normal((2, 6, 3)).astype(np.float32)
    options = {"places": range(3, 4), "window": 2, "negatives": 7, "cbow": cbow}
    got, drawn, _ = step(stream, np.zeros(6), tables, lr=1e-2, **options)
    at = torch.tensor(tables, dtype=torch.float64)
    gradient, (near, targets) = torch.zeros_like(at), drawn[0]
    for index in np.ndindex(*at.shape):
        for sign in (1, -1):
            at[index] += sign * 1e-5
            gradient[index] += sign * position_loss(at, near, targets, cbow=cbow) / 2e-5
            at[index] -= sign * 1e-5
    np.testing.assert_allclose((tables - got) / 1e-2, gradient, atol=1e-4)
    assert gradient[0][near].abs().min() > 1e-3


def test_rows_of_ngrams_get_the_changes_of_their_words(threads):
    stream = np.minimum(rng.geometric(0.02, 4 * PART), 99)
    words, buckets, width = stream.max() + 1, 30, 12
    rows = [np.append(i, words + rng.integers(0, buckets, i % 5)) for i in range(words)]
    bounds = np.append(0, np.cumsum([row.size for row in rows]))
    table = rng.standard_normal((words + buckets, width)).astype(np.float32) / 2
    other = rng.standard_normal((words, width)).astype(np.float32) / 2
    means = np.stack([table[row].mean(axis=0) for row in rows])
    options = {"negatives": 4, "window": 2, "lr": 0.1}
    got, drawn, _ = step(
        stream,
        np.zeros_like(stream),
        [table.copy(), other.copy()],
        word_rows=WordRows(bounds, np.concatenate(rows).astype(np.int32)),
        buckets=buckets,
        **options,
    )
    start = [torch.tensor(array, dtype=torch.float64) for array in (means, other)]
    total, count = np.zeros_like(table), np.zeros(len(table))
    for (change, _), (touched, _) in part_changes(start, drawn, 0.1, cbow=False):
        for word in touched:
            np.add.at(total, rows[word], change[word].numpy())
            np.add.at(count, rows[word], 1)
    want = table + total * np.minimum(1, MAX_SUM / np.maximum(count, 1))[:, None]
    np.testing.assert_allclose(got[0], want, atol=3e-4)
    np.testing.assert_allclose(got[1], reference([means, other], drawn, 0.1)[1], atol=2e-4)
    assert np.abs(got[0][words:] - table[words:]).max() > 0.1


def test_rows_of_words_are_those_of_fasttext():
    words = ["word", "", "été", "漢字", "a"]
    text, bounds = bracketed([word.encode() for word in words])
    options = {"buckets": 1000, "lengths": (2, 4)}
    found = kernels.subword_rows(text, bounds, **options)
    table = rng.standard_normal((5 + 1000, 3)).astype(np.float32)
    means, counts = Subwords(table, **options).means(
        [word.encode() for word in words], np.arange(5)
    )
    assert np.diff(found.bounds).tolist() == counts.tolist() == [13, 1, 10, 7, 4]
    for i in range(5):
        rows = found.rows[found.bounds[i] : found.bounds[i + 1]]
        assert rows[0] == i and (rows[1:] >= 5).all()
        np.testing.assert_allclose(table[rows].mean(axis=0), means[i], atol=1e-6)


def test_tables_and_memory_of_steps_begin_at_a_cache_line():
    work = kernels.word2vec_workspace(
        200, num_embeddings=9, embedding_dim=10, window=3, negatives=2, buckets=4
    )
    model = Word2Vec(corpus_of("a few words " * 100), SMALL)
    arrays = [work.inputs.rows, work.outputs.rows, work.before, work.slopes, work.sums]
    for array in [*arrays, model.table, model.others]:
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous
    # Two threads never write to the same cache line of these.
    assert all(array[0].nbytes % 64 == 0 for array in arrays)


def test_loss_is_the_mean_of_every_sixteenth_position():
    stream = rng.integers(0, 40, 100)
    tables = rng.standard_normal((2, 40, 8)).astype(np.float32)
    _, drawn, (loss, count) = step(stream, np.zeros(100), tables)
    own = [torch.tensor(table, dtype=torch.float64) for table in tables]
    want = sum(float(position_loss(own, *drawn[place])) for place in range(0, 100, 16))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert count == sum(len(drawn[place][0]) for place in range(0, 100, 16))


def test_extreme_dot_products_have_a_finite_loss_and_update():
    tables = np.full((2, 3, 4), 1e3, np.float32)
    tables[1] *= -1
    got, _, (loss, count) = step(np.array([0, 1, 2] * 10), np.zeros(30), tables, lr=0.1)
    assert np.isfinite(got).all() and np.isfinite(loss) and loss / count > 1e6


def grammar(count=4000):
    """Return a text in which words of a kind stand in the same places."""
    kinds = {
        "colour": "red green blue black white".split(),
        "animal": "cat dog cow horse whale".split(),
        "verb": "sees hears follows finds likes".split(),
    }
    words = np.array(list(kinds.values()))[[0, 1, 2, 0, 1]]
    picks = np.random.default_rng(0).integers(0, 5, (count, 5))
    text = ". ".join(" ".join(words[range(5), row]) for row in picks)
    return text, kinds


def corpus_of(text):
    documents = [[text]]
    return tokenized(documents, learn_tokenizer(documents))


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_words_used_alike_become_neighbors(method):
    text, kinds = grammar()
    corpus = corpus_of(text)
    setting = Word2VecOptions(method, embedding_dim=16, epochs=3, window=1, sample=1)
    model = Word2Vec(corpus, setting)
    reports = []
    assert model.run(report=reports.append, every=0)
    assert reports[-1].done == 1 and reports[-1].loss < reports[0].loss - 1
    assert [r.tokens for r in reports] == sorted(r.tokens for r in reports)
    weight = model.result()
    unit = weight / np.maximum(np.linalg.norm(weight, axis=1, keepdims=True), 1e-9)
    rows = corpus.tokenizer.get_vocab()
    for words in kinds.values():
        for word in words:
            order = np.argsort(-unit @ unit[rows[word]])
            assert set(order[:5]) == {rows[other] for other in words}


def test_row_of_unknown_words_stays_zero():
    model = Word2Vec(corpus_of(grammar(500)[0]), Word2VecOptions(embedding_dim=8, epochs=1))
    model.run()
    assert model.corpus.unknown == 0 and not model.result()[0].any()
    assert np.abs(model.result()[1:]).min(axis=1).all()


SMALL = Word2VecOptions(
    embedding_dim=12, epochs=2, batch=300, window=3, negatives=7, sample=0.05
)
VARIANTS = {
    "skipgram": {},
    "cbow": {"method": "cbow", "lr": 0.2, "earlier_epochs": 3},
    "subwords": {"buckets": 50, "min_n": 2, "max_n": 4},
    "cbow of subwords": {"method": "cbow", "buckets": 40, "min_n": 1},
}


def learned(corpus, *, stops=(), **changes):
    """Return the tables after a run that is interrupted after so many batches."""
    setting = replace(SMALL, **changes)
    model = Word2Vec(corpus, setting)
    for batches in stops:
        left = iter(range(batches))
        assert not model.run(stop=lambda left=left: next(left, None) is None)
        state = {name: array.copy() for name, array in model.state_dict().items()}
        model = Word2Vec(corpus, setting)
        model.load_state_dict(state)
    assert model.run()
    return np.concatenate([model.result(), model.table, model.others]).tobytes()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_result_is_independent_of_threads(changes):
    corpus, before = corpus_of(grammar(600)[0]), kernels.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        kernels.set_num_threads(threads)
        results.append(learned(corpus, **changes))
    kernels.set_num_threads(before)
    assert results[0] == results[1] == results[2] != learned(corpus, **changes, seed=1)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_resumed_run_gives_the_same_bits(changes):
    corpus = corpus_of(grammar(600)[0])
    want = learned(corpus, **changes)
    # In the middle of an epoch, at its end, in the next one; and before anything.
    assert learned(corpus, stops=[3, 1], **changes) == want
    assert learned(corpus, stops=[0, 8], **changes) == want


def test_each_option_of_a_variant_changes_the_tables():
    corpus = corpus_of(grammar(200)[0])
    base = {"buckets": 50, "min_n": 2, "max_n": 4}
    results = [learned(corpus, **base)] + [
        learned(corpus, **{**base, **change})
        for change in ({"method": "cbow"}, {"earlier_epochs": 1}, {"min_n": 3})
    ]
    results += [learned(corpus, **{**base, "max_n": 5}), learned(corpus)]
    assert len(set(results)) == 6


def test_subsampling_equals_the_word2vec_formula():
    counts = np.array([0, 10, 1000, 98_990])
    share = counts[1:] / counts.sum()
    want = (np.sqrt(share / 1e-2) + 1) * 1e-2 / share
    got = kept_share(counts, sample=1e-2)
    np.testing.assert_allclose(got[1:], np.minimum(want, 1), rtol=1e-6)
    assert got[1] == 1 and 0 < got[3] < got[2] <= 1


@pytest.mark.rejects
def test_bad_options_are_rejected():
    with pytest.raises(ValueError, match="window must be at most 16, got 17"):
        Word2VecOptions(window=17)
    with pytest.raises(ValueError, match="negatives must be at most 1000, got 1001"):
        Word2VecOptions(negatives=1001)
    with pytest.raises(ValueError, match="embedding_dim must be positive, got 0"):
        Word2VecOptions(embedding_dim=0)
    for lr in (float("nan"), 0.0, 1e300):
        want = re.escape(f"lr must be positive and a float32, got {lr}")
        with pytest.raises(ValueError, match=want):
            Word2VecOptions(lr=lr)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        Word2VecOptions(seed=-1)
    with pytest.raises(ValueError, match="method must be 'skipgram' or 'cbow', got 'bag'"):
        Word2VecOptions("bag")
    with pytest.raises(ValueError, match="max_n must be at least min_n, which is 3, got 2"):
        Word2VecOptions(max_n=2)
    with pytest.raises(ValueError, match="max_n must be at most 64, got 65"):
        Word2VecOptions(max_n=65)
    with pytest.raises(ValueError, match="buckets must be at least 0, got -1"):
        Word2VecOptions(buckets=-1)


@pytest.mark.rejects
def test_text_with_one_word_is_rejected():
    match = "at least 2 different tokens in its vocabulary, got 1: give more text"
    with pytest.raises(ValueError, match=match):
        Word2Vec(corpus_of("word " * 100), Word2VecOptions())


def test_reported_loss_is_independent_of_reports_and_interruptions():
    corpus, losses = corpus_of(grammar(1000)[0]), []
    for every, batches in ((0, None), (1e9, None), (0, 5)):
        model, reports = Word2Vec(corpus, SMALL), []
        if batches is not None:
            left = iter(range(batches))
            model.run(stop=lambda left=left: next(left, None) is None)
            state, model = model.state_dict(), Word2Vec(corpus, SMALL)
            model.load_state_dict(state)
        model.run(report=reports.append, every=every)
        losses.append(reports[-1].loss)
    assert losses[0] == losses[1] == losses[2] > 0


@pytest.mark.rejects
def test_replaced_table_is_rejected():
    model = Word2Vec(corpus_of("a few words " * 100), SMALL)
    model.others = model.others[:2]
    want = re.escape("the tables must have shape (4, 12), got (2, 12)")
    with pytest.raises(ValueError, match=want):
        model.run()


@pytest.mark.rejects
def test_foreign_state_is_rejected():
    model = Word2Vec(corpus_of("a few words " * 100), SMALL)
    with pytest.raises(ValueError, match="state must have others, got"):
        model.load_state_dict({"table": model.table, "loss": np.zeros(2)})
    state = {**model.state_dict(), "others": np.zeros((2, 12))}
    with pytest.raises(ValueError, match=re.escape("others must have shape (4, 12), got")):
        model.load_state_dict(state)
