"""Skip-gram learns what its definition says, to the bit the same for any thread count."""

import re

import numpy as np
import pytest
import torch

from firstlayer import kernels
from firstlayer.word_vectors.corpus import learn_tokenizer, tokenized
from firstlayer.word_vectors.skipgram import SkipGram, SkipGramOptions, kept_share

NEGATIVES, SHARED = 16, 8
rng = np.random.default_rng(0)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


def drawn(stream, documents, *, window=3, shares=None, key=7):
    shares = np.ones(stream.max() + 1) if shares is None else shares
    return kernels.draw_targets(
        stream.astype(np.int32),
        np.asarray(documents, np.int32),
        range(stream.size),
        window=window,
        noise=kernels.noise_table(shares),
        key=key,
    )


def test_context_words_are_within_reach_in_the_same_document():
    stream, documents = np.arange(3000), np.repeat([0, 1, 2], 1000)
    targets, near = drawn(stream, documents, window=4)
    reaches = []
    for place in stream:
        found = targets[place, : near[place]]
        reach = abs(found - place).max()
        reaches.append(reach)
        lo, hi = place // 1000 * 1000, place // 1000 * 1000 + 1000
        whole = [p for p in range(place - reach, place + reach + 1) if lo <= p < hi]
        assert found.tolist() == [p for p in whole if p != place]
    # Places at an end aside, every reach is as likely as any other.
    counts = np.bincount(reaches)[1:]
    assert counts.size == 4 and np.abs(counts / 3000 - 0.25).max() < 0.04


def test_negatives_follow_their_distribution_and_are_shared():
    stream = np.zeros(80_000, int)
    shares = np.array([5.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.001])
    targets, near = drawn(stream, stream, window=1, shares=shares)
    noise = np.array([row[n : n + NEGATIVES] for row, n in zip(targets, near, strict=True)])
    groups = noise.reshape(-1, SHARED, NEGATIVES)
    assert (groups == groups[:, :1]).all()
    assert len(np.unique(groups[:, 0], axis=0)) > 9000
    counts = np.bincount(groups[:, 0].ravel(), minlength=7)
    np.testing.assert_allclose(counts / counts.sum(), shares / shares.sum(), atol=4e-3)
    assert counts[[1, 3, 4]].sum() == 0 and counts[6] > 0


def test_draws_depend_only_on_position_and_key(threads):
    stream = rng.integers(0, 50, 5000)
    targets, near = drawn(stream, np.zeros(5000, int))
    noise = kernels.noise_table(np.ones(50))
    part, part_near = kernels.draw_targets(
        stream.astype(np.int32),
        np.zeros(5000, np.int32),
        range(1001, 1100),
        window=3,
        noise=noise,
        key=7,
    )
    for i, place in enumerate(range(1001, 1100)):
        count = part_near[i] + NEGATIVES
        assert count == near[place] + NEGATIVES
        assert part[i, :count].tolist() == targets[place, :count].tolist()
    others, other_near = drawn(stream, np.zeros(5000, int), key=8)
    assert (other_near != near).any() and (
        others[0, :NEGATIVES] != targets[0, :NEGATIVES]
    ).any()


def places(count=300, words=40, width=20):
    """Return tables and drawn targets, as a batch has them."""
    stream = rng.integers(0, words, count)
    targets, near = drawn(stream, np.arange(count) // 50)
    tables = rng.standard_normal((2, words, width)).astype(np.float32) / 2
    return tables, stream, targets, near


def reference(tables, centers, targets, near, negatives):
    """Return loss and gradients in float64, one product after the other."""
    table, other = (
        torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in tables
    )
    losses = []
    for i, center in enumerate(centers):
        rows = torch.from_numpy(targets[i, : near[i] + NEGATIVES].astype(np.int64))
        dots = other[rows] @ table[int(center)]
        logs = torch.nn.functional.logsigmoid
        told, untold = logs(dots[: near[i]]), logs(-dots[near[i] :])
        losses.append(-told.sum() - near[i] * negatives / NEGATIVES * untold.sum())
    torch.stack(losses).sum().backward()
    found = [np.asarray(t.grad) for t in (table, other)]
    return torch.stack(losses).detach().numpy(), *found


def test_losses_and_gradients_equal_autograd_in_float64(threads):
    tables, centers, targets, near = places()
    want, dtable, dother = reference(tables, centers, targets, near, 6)
    slopes, pulls, losses = kernels.skipgram_gradients(
        tables[0], tables[1], centers, targets=targets, near=near, negatives=6
    )
    np.testing.assert_allclose(losses, want, rtol=2e-5)
    got = np.zeros_like(dtable)
    np.add.at(got, centers, pulls)
    np.testing.assert_allclose(got, dtable, atol=2e-4)
    ids, bounds, rows, weights = kernels.group_targets(
        centers, targets, near=near, slopes=slopes, num_embeddings=40
    )
    got = np.zeros_like(dother)
    got[ids] = kernels.sum_bags(tables[0], rows, bounds, weights=weights)
    np.testing.assert_allclose(got, dother, atol=2e-4)


def test_targets_are_grouped_in_order_of_positions():
    tables, centers, targets, near = places()
    slopes = rng.standard_normal(targets.shape).astype(np.float32)
    want: dict[int, list[tuple[int, float]]] = {}
    for i, center in enumerate(centers):
        for k in range(near[i] + NEGATIVES):
            want.setdefault(int(targets[i, k]), []).append((int(center), slopes[i, k]))
    ids, bounds, rows, weights = kernels.group_targets(
        centers, targets, near=near, slopes=slopes, num_embeddings=45
    )
    assert ids.tolist() == sorted(want)
    for group, word in enumerate(ids.tolist()):
        here = slice(bounds[group], bounds[group + 1])
        pairs = zip(rows[here].tolist(), weights[here], strict=True)
        assert list(pairs) == want[word]


def test_extreme_dot_products_have_a_finite_loss():
    tables = np.full((2, 3, 4), 1e3, np.float32)
    tables[1] *= -1
    targets, near = drawn(np.array([0, 1, 2] * 10), np.zeros(30, int), window=16)
    slopes, pulls, losses = kernels.skipgram_gradients(
        tables[0],
        tables[1],
        np.array([0, 1, 2] * 10),
        targets=targets,
        near=near,
        negatives=5,
    )
    assert np.isfinite(losses).all() and (losses > 20).all()
    assert np.isfinite(slopes[0, : near[0]]).all() and np.isfinite(pulls).all()


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


def test_words_used_alike_become_neighbors():
    text, kinds = grammar()
    corpus = corpus_of(text)
    setting = SkipGramOptions(embedding_dim=16, epochs=3, window=1, batch=512, sample=1)
    model = SkipGram(corpus, setting)
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


def test_result_has_zero_mean_and_a_zero_unknown_row():
    model = SkipGram(corpus_of(grammar(500)[0]), SkipGramOptions(embedding_dim=8, epochs=1))
    model.run()
    weight = model.result()
    assert model.corpus.unknown == 0 and not weight[0].any()
    np.testing.assert_allclose(weight[1:].mean(axis=0), 0, atol=1e-6)
    moved = model.table.weight[1:] - weight[1:]
    np.testing.assert_allclose(moved, np.tile(moved[:1], (len(moved), 1)), atol=1e-6)


SMALL = SkipGramOptions(
    embedding_dim=12, epochs=2, batch=300, window=3, negatives=7, sample=0.05
)


def learned(corpus, *, seed=0, stops=()):
    """Return the table after a run that is interrupted after so many batches."""
    setting = SkipGramOptions(**{**vars(SMALL), "seed": seed})
    model = SkipGram(corpus, setting)
    for batches in stops:
        left = iter(range(batches))
        assert not model.run(stop=lambda left=left: next(left, None) is None)
        state = {name: array.copy() for name, array in model.state_dict().items()}
        model = SkipGram(corpus, setting)
        model.load_state_dict(state)
    assert model.run()
    return model.result()


def test_result_is_independent_of_threads(threads):
    corpus = corpus_of(grammar(1000)[0])
    kernels.set_num_threads(1)
    want = learned(corpus)
    kernels.set_num_threads(threads)
    assert learned(corpus).tobytes() == want.tobytes()
    assert learned(corpus, seed=1).tobytes() != want.tobytes()


def test_resumed_run_gives_the_same_bits():
    corpus = corpus_of(grammar(1000)[0])
    want = learned(corpus)
    # In the middle of an epoch, at its end, in the next one; and before anything.
    assert learned(corpus, stops=[3, 1]).tobytes() == want.tobytes()
    assert learned(corpus, stops=[0, 14]).tobytes() == want.tobytes()


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
        SkipGramOptions(window=17)
    with pytest.raises(ValueError, match="embedding_dim must be positive, got 0"):
        SkipGramOptions(embedding_dim=0)
    for lr in (float("nan"), 0.0, 1e300):
        want = re.escape(f"lr must be positive and a float32, got {lr}")
        with pytest.raises(ValueError, match=want):
            SkipGramOptions(lr=lr)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        SkipGramOptions(seed=-1)


@pytest.mark.rejects
def test_text_with_one_word_is_rejected():
    match = "at least 2 different tokens in its vocabulary, got 1: give more text"
    with pytest.raises(ValueError, match=match):
        SkipGram(corpus_of("word " * 100), SkipGramOptions())


@pytest.mark.rejects
def test_foreign_state_is_rejected():
    model = SkipGram(corpus_of("a few words " * 100), SMALL)
    with pytest.raises(ValueError, match="state must have others, got"):
        model.load_state_dict({"table": model.table.weight})
