"""Comparing position schemes: equal conditions, correct models, correct losses."""

import dataclasses
import math
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.positions import claims
from firstlayer.analysis.position_study import (
    QUICK,
    RULES,
    SCHEMES,
    Curve,
    Setting,
    Study,
    compare,
    data,
    measure,
    python_source,
    training,
)
from firstlayer.analysis.position_study.distance_profile import distance_profile
from firstlayer.analysis.position_study.transformer import Transformer
from firstlayer.numpy import RotaryPositions as NumpyRotary
from firstlayer.numpy import SinusoidalPositions as NumpySinusoidal
from firstlayer.numpy import XPosRotary as NumpyXPos
from firstlayer.positions.alibi import alibi_slopes
from firstlayer.positions.scaling import NTK, Linear, YaRN

TINY = Setting(
    layers=1,
    width=16,
    heads=2,
    length=16,
    batch=8,
    steps=40,
    rate=1e-2,
    stretches=(1.0, 1.5, 3.0),
    seeds=1,
    windows=8,
    targets=5,
    seed=3,
)
#: Random words: there is something to learn, but the loss cannot reach zero.
TEXT = b" ".join(
    [b"alpha", b"beta", b"gamma", b"delta"][i]
    for i in np.random.default_rng(0).integers(0, 4, 3000)
)
RELATIVE = ("rotary", "randomised", "xpos", "alibi", "t5", "kerple", "fire")
ABSOLUTE = ("learned", "sinusoidal")


def model_of(scheme, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {"layers": 2, "width": 16, "heads": 2, "length": 32, **sizes}
    return Transformer(scheme, **sizes).eval()


def bytes_of(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape))


# Training batches and test windows.


def test_the_same_bytes_are_predicted_at_every_length():
    _, held_out = data.split(TEXT, setting=TINY)
    found = [data.windows(held_out, n, setting=TINY) for n in TINY.lengths]
    for read, targets in found[:-1]:
        np.testing.assert_array_equal(targets, found[-1][1])
        np.testing.assert_array_equal(read, found[-1][0][:, -read.shape[1] :])
    assert [read.shape for read, _ in found] == [(8, n) for n in (16, 24, 48)]


def test_targets_are_the_bytes_after_the_inputs():
    held_out = np.arange(251, dtype=np.uint8)
    read, targets = data.windows(held_out, 16, setting=TINY)
    np.testing.assert_array_equal(targets, read[:, -TINY.targets :] + 1)
    # Windows end between the first place with the longest context and the last byte.
    assert targets[0, -1] == max(TINY.lengths) and targets[-1, -1] == 250


def test_the_last_tenth_is_held_out_from_training():
    learn, held_out = data.split(TEXT, setting=TINY)
    assert bytes(learn) + bytes(held_out) == TEXT
    assert len(held_out) == len(TEXT) // 10
    last = np.zeros(100, np.uint8)
    last[-1] = 1
    drawn = np.concatenate(list(data.batches(last, setting=TINY)))
    assert drawn.shape == (8 * 40, 17) and drawn[:, :-1].sum() == 0 < drawn[:, -1].sum()


def test_batches_follow_the_seed():
    learn, _ = data.split(TEXT, setting=TINY)

    def drawn(seed):
        setting = dataclasses.replace(TINY, seed=seed)
        return np.stack(list(data.batches(learn, setting=setting)))

    np.testing.assert_array_equal(drawn(3), drawn(3))
    assert (drawn(3) != drawn(4)).any()
    for row in drawn(3)[0]:
        assert row.astype(np.uint8).tobytes() in TEXT


def test_the_python_source_is_long_enough_to_train_on():
    text = python_source()
    assert b"class Fraction" in text and len(text) > 2_000_000


# The model.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_logit_depends_on_a_later_byte(scheme):
    model, ids = model_of(scheme), bytes_of(2, 20)
    changed = ids.clone()
    changed[:, 12] += 1
    changed %= 256
    with torch.inference_mode():
        difference = (model(ids) - model(changed)).abs().amax((0, 2))
    assert difference[:12].max() == 0 and difference[12:].min() > 0


@pytest.mark.parametrize("scheme", [*RELATIVE, "none"])
def test_relative_schemes_depend_only_on_differences_of_positions(scheme):
    model, ids = model_of(scheme), bytes_of(2, 20)
    steps = torch.arange(20)
    with torch.inference_mode():
        here, moved = model(ids, steps), model(ids, steps + 37)
        spread = model(ids, steps * 3)
    torch.testing.assert_close(here, moved, atol=2e-5, rtol=0)
    if scheme != "none":
        assert (here - spread).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", ABSOLUTE)
def test_absolute_schemes_depend_on_the_first_position(scheme):
    model, ids, steps = model_of(scheme), bytes_of(2, 20), torch.arange(20)
    with torch.inference_mode():
        assert (model(ids, steps) - model(ids, steps + 12)).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_last_selects_the_last_logits(scheme):
    model, ids = model_of(scheme), bytes_of(2, 20)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids, last=3), model(ids)[:, -3:])


def attention(model, ids, *, rotate=None, rotate_keys=None, bias=None):
    """Return the logits of a one-layer model, with attention written out."""
    block, x = model.blocks[0], model.embedding(ids)
    q, k, v = block.qkv(block.before_attention(x)).chunk(3, dim=-1)
    mixed = torch.zeros_like(q)
    size = q.shape[-1] // block.heads
    for head in range(block.heads):
        own = slice(head * size, (head + 1) * size)
        qs, ks = q[..., own], k[..., own]
        if rotate is not None:
            qs = torch.from_numpy(rotate(qs.detach().numpy()))
            ks = torch.from_numpy((rotate_keys or rotate)(ks.detach().numpy()))
        for at in range(ids.shape[1]):
            scores = (qs[:, at, None] * ks[:, : at + 1]).sum(-1) / size**0.5
            if bias is not None:
                scores = scores + torch.tensor([bias(head, at - j) for j in range(at + 1)])
            mixed[:, at, own] = (scores.softmax(-1)[..., None] * v[:, : at + 1, own]).sum(1)
    x = x + block.out(mixed)
    x = x + block.down(torch.nn.functional.gelu(block.up(block.before_linear(x))))
    return model.norm(x) @ model.embedding.token.weight.T


def test_attention_matches_the_formula():
    slopes, ids = alibi_slopes(2), bytes_of(2, 9)
    xpos = NumpyXPos(8, heads_axis=-3)
    cases = {
        "none": {},
        "alibi": {"bias": lambda head, back: -slopes[head] * back},
        "rotary": {"rotate": NumpyRotary(8, heads_axis=-3)},
        "xpos": {"rotate": xpos, "rotate_keys": partial(xpos, keys=True)},
    }
    for scheme, options in cases.items():
        model = model_of(scheme, layers=1)
        with torch.inference_mode():
            torch.testing.assert_close(
                model(ids), attention(model, ids, **options), atol=1e-5, rtol=1e-5
            )


# Training and testing.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_learns_reproducibly(scheme):
    before = torch.random.get_rng_state()
    found = measure(TEXT, scheme, setting=TINY)
    again = measure(TEXT, scheme, setting=TINY)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (found.training, found.curves) == (again.training, again.curves)
    assert abs(found.training[0] - math.log(256)) < 1.5
    # Letter frequencies alone give 2.2 nats.
    at_length = found.curves[0].losses[0]
    assert at_length is not None and at_length < 2.6
    assert [c.rule for c in found.curves] == [None, *RULES.get(scheme, ())]


def test_the_number_of_threads_is_restored_and_does_not_change_losses():
    before, setting = torch.get_num_threads(), dataclasses.replace(TINY, steps=3)
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(measure(TEXT, "alibi", setting=setting).training)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_another_seed_gives_other_losses():
    other = dataclasses.replace(TINY, seed=4, steps=2)
    here = measure(TEXT, "none", setting=dataclasses.replace(TINY, steps=2))
    assert measure(TEXT, "none", setting=other).training != here.training


def test_randomised_differs_from_rotary_only_in_training_positions():
    plain, random = (measure(TEXT, s, setting=TINY) for s in ("rotary", "randomised"))
    assert plain.training[0] != random.training[0]
    assert plain.profile == random.profile and plain.parameters == random.parameters


def test_every_parameter_is_trained():
    for scheme in SCHEMES:
        torch.manual_seed(0)
        model = training.build(scheme, setting=TINY)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        learn, _ = data.split(TEXT, setting=TINY)
        steps = training.steps(model, learn, scheme=scheme, setting=TINY)
        for _ in range(3):
            next(steps)
        for name, parameter in model.named_parameters():
            assert not torch.equal(parameter, start[name]), (scheme, name)


def test_kerple_parameters_stay_above_their_minimum():
    torch.manual_seed(0)
    setting = dataclasses.replace(TINY, rate=0.5)
    model: Any = training.build("kerple", setting=setting)
    learn, _ = data.split(TEXT, setting=setting)
    for _ in training.steps(model, learn, scheme="kerple", setting=setting):
        assert min(model.bias.r1.min(), model.bias.r2.min()).item() >= np.float32(0.01)


def test_the_learning_rate_warms_up_and_decays():
    setting = Setting(steps=200, rate=0.5)
    rates = [training.learning_rate(step, setting=setting) for step in range(200)]
    assert rates[:10] == sorted(rates[:10]) and max(rates) == rates[9] == 0.5
    assert rates[9:] == sorted(rates[9:], reverse=True) and 0 < rates[-1] < 1e-4


@pytest.mark.parametrize("scheme, rule", [(s, r) for s in RULES for r in RULES[s]])
def test_a_rule_changes_nothing_at_the_training_length(scheme, rule):
    found = measure(TEXT, scheme, setting=TINY)
    plain, changed = found.curves[0], found.curves[1 + RULES[scheme].index(rule)]
    assert changed.losses[0] == pytest.approx(plain.losses[0], abs=1e-6)
    assert changed.losses[-1] != plain.losses[-1] and changed.losses[-1] is not None


@pytest.mark.parametrize(
    "rule, scaling",
    [
        ("linear", Linear(factor=3.0)),
        ("ntk", NTK(factor=3.0)),
        ("yarn", YaRN(factor=3.0, original_length=16)),
    ],
)
def test_a_rule_scales_by_the_ratio_of_lengths(rule, scaling):
    # Heads wide enough that YaRN depends on the original length.
    setting = dataclasses.replace(TINY, width=64)
    model = training.build("rotary", setting=setting)
    changed: Any = training.apply_rule(model, rule, length=48, setting=setting)
    want = scaling.inverse_frequencies(32, base=10_000.0)
    np.testing.assert_array_equal(changed.rotary.frequencies, want)
    assert changed.rotary.attention_factor == scaling.attention_factor
    assert model.rotary is not None and model.rotary.scaling is None


def test_a_learned_table_has_no_loss_beyond_the_training_length_unless_resized():
    found = measure(TEXT, "learned", setting=TINY)
    plain, resized = found.curves
    assert plain.losses[1:] == (None, None) and plain.rise is None
    assert resized.name == "learned + resized" and resized.rise is not None


@pytest.mark.parametrize("scheme", ["alibi", "rotary"])
def test_the_loss_is_the_mean_over_all_targets_for_any_batch_size(scheme, monkeypatch):
    torch.manual_seed(0)
    model = training.build(scheme, setting=TINY)
    _, held_out = data.split(TEXT, setting=TINY)
    read, targets = map(torch.from_numpy, data.windows(held_out, 24, setting=TINY))
    with torch.inference_mode():
        chosen = model(read)[:, -5:].log_softmax(-1).gather(-1, targets[..., None])
    for scores in (1, 3 * 2 * 24 * 24, 1 << 30):
        monkeypatch.setattr(training, "MAX_SCORES", scores)
        loss = training.held_out_loss(model, held_out, 24, setting=TINY)
        assert loss == pytest.approx(-chosen.mean().item(), abs=1e-5)


# Profiles of distance.


def test_profiles_match_the_formulas_of_the_schemes():
    longest, apart = max(TINY.lengths), np.arange(max(TINY.lengths))
    profiles: dict[str, Any] = {}
    for scheme in SCHEMES:
        torch.manual_seed(0)
        profiles[scheme] = distance_profile(
            training.build(scheme, setting=TINY), setting=TINY
        )
    assert profiles["none"] is None
    slopes = alibi_slopes(2)
    np.testing.assert_allclose(
        profiles["alibi"].values, -slopes[:, None] * apart, rtol=1e-6
    )
    cos, _ = NumpyRotary(8).phases(apart)
    np.testing.assert_allclose(profiles["rotary"].values, [cos.mean(-1)], atol=1e-6)
    scales = ((np.arange(4) / 4 + 0.4) / 1.4) ** (apart[:, None] / 512)
    want = [(scales * cos).mean(-1)]
    np.testing.assert_allclose(profiles["xpos"].values, want, atol=1e-6)
    rows = NumpySinusoidal(16).encode(np.array([0, *apart]))
    np.testing.assert_allclose(
        profiles["sinusoidal"].values, [rows[1:] @ rows[0] / 8], atol=1e-5
    )
    assert len(profiles["learned"].distances) == TINY.length
    assert profiles["learned"].values[0][0] == pytest.approx(1.0)
    assert profiles["t5"].what == "bias" and len(profiles["t5"].values) == TINY.heads
    assert profiles["alibi"].distances == tuple(range(longest))


def test_a_learned_profile_is_the_mean_cosine_by_distance():
    model = training.build("learned", setting=TINY)
    rows = model.embedding.position.weight.detach().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    want = [np.mean([rows[i] @ rows[i + 7] for i in range(16 - 7)])]
    found = distance_profile(model, setting=TINY)
    assert found and found.values[0][7] == pytest.approx(want[0], abs=1e-6)


# The claims of the benchmark.


def curves_of(**changed):
    """Return curves with the published shape, except for those that are given."""
    rows = {name: [2.2, 2.2, 2.2, 2.2, 2.2] for name in SCHEMES}
    rows |= {
        "sinusoidal": [2.2, 3.1, 3.1, 3.2, 3.2],
        "rotary": [1.7, 1.75, 1.9, 2.6, 3.0],
        "rotary + linear": [1.7, 2.0, 2.3, 2.8, 3.1],
        "rotary + ntk": [1.7, 1.76, 1.77, 2.5, 2.4],
        "rotary + yarn": [1.7, 1.76, 1.8, 1.9, 2.1],
    }
    for name, losses in changed.items():
        rows[name.replace("_", " + ")] = losses
    lengths = Setting().lengths
    return {name: Curve(name, None, lengths, tuple(row)) for name, row in rows.items()}


@pytest.mark.parametrize(
    "changed, broken",
    [
        ({}, []),
        ({"alibi": [2.2, 2.2, 2.2, 2.2, 2.26]}, ["ALiBi"]),
        ({"kerple": [1.6, 1.6, 1.6, 1.6, 1.6]}, ["rotary is best"]),
        ({"sinusoidal": [2.2, 2.7, 3.1, 3.2, 3.2]}, ["sinusoidal"]),
        ({"rotary_yarn": [1.7, 1.7, 1.7, 2.2, 2.2]}, ["yarn"]),
        ({"rotary_ntk": [1.7, 1.7, 1.85, 2.2, 2.2]}, ["ntk"]),
        ({"rotary_linear": [1.7, 1.75, 1.9, 2.2, 2.2]}, ["interpolation"]),
        ({"rotary": [1.7, 1.7, 2.0, 2.35, 3.0]}, ["rotary rises", "yarn"]),
    ],
)
def test_the_benchmark_reports_claims_that_do_not_hold(changed, broken):
    found = claims(curves_of(**changed), 128)
    failed = [claim.text for claim in found if not claim.holds]
    assert len(failed) == len(broken)
    for text, word in zip(failed, broken, strict=True):
        assert text.startswith(word)


# Results and errors.


def test_compare_returns_a_result_per_scheme_and_reports_every_step():
    calls, setting = [], dataclasses.replace(TINY, steps=2, seeds=2)
    found = compare(
        TEXT, ["alibi", "none"], setting=setting, progress=lambda *step: calls.append(step)
    )
    assert [step[:3] for step in calls] == [
        (scheme, step, 4) for scheme in ("alibi", "none") for step in (1, 2, 3, 4)
    ]
    assert [loss for *_, loss in calls[:2]] == list(found.trained[0].training)
    assert [curve.name for curve in found.curves] == ["alibi", "none"]
    losses = {curve.losses[0]: curve for curve in found.curves}
    assert found.ranking(16)[0] is losses[min(losses, key=float)]  # pyright: ignore
    plain = found.as_dict()
    assert plain["trained"][0]["curves"][0]["losses"] == found.curves[0].losses
    assert plain["bytes"] == len(TEXT) and plain["setting"]["width"] == 16


def test_a_scheme_is_averaged_over_models_with_consecutive_seeds():
    setting = dataclasses.replace(TINY, steps=2, seeds=2, seed=7)
    (both,) = compare(TEXT, ["rotary"], setting=setting).trained
    single = [
        compare(TEXT, ["rotary"], setting=dataclasses.replace(setting, seeds=1, seed=seed))
        for seed in (7, 8)
    ]
    for i, curve in enumerate(both.curves):
        one, other = (np.array(study.curves[i].losses, float) for study in single)
        mean, spread = np.array(curve.losses, float), np.array(curve.spreads, float)
        np.testing.assert_allclose(mean, (one + other) / 2, rtol=1e-12)
        np.testing.assert_allclose(spread, abs(one - other) / 2**0.5, atol=1e-12)
    assert both.training == single[0].trained[0].training


def test_the_rise_of_a_curve_is_last_minus_first():
    curve = Curve("rotary", "yarn", (16, 32), (1.0, 1.25))
    assert (curve.rise, curve.at(32), curve.name) == (0.25, 1.25, "rotary + yarn")


def test_the_lengths_of_the_default_and_quick_settings():
    assert Setting().lengths == (128, 192, 256, 512, 1024)
    assert QUICK.lengths == (64, 96, 128, 256, 512)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Study(QUICK, 0, ()).bytes = 1  # pyright: ignore


@pytest.mark.rejects
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"layers": 0}, "layers must be positive, got 0"),
        ({"width": 20}, "multiple of twice the heads, 8, got 20"),
        ({"targets": 129}, "targets must be from 1 to length 128, got 129"),
        ({"targets": 0}, "targets must be from 1 to length 128, got 0"),
        ({"stretches": (2.0, 1.0)}, "stretches must ascend from at least 1"),
        ({"stretches": (0.5, 1.0)}, "stretches must ascend from at least 1"),
        ({"stretches": ()}, "stretches must ascend from at least 1"),
    ],
)
def test_invalid_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Setting(**wrong)


@pytest.mark.rejects
def test_a_text_too_short_for_the_longest_length_is_refused():
    message = "text must have at least 560 bytes for lengths up to 48, got 100"
    with pytest.raises(ValueError, match=message):
        measure(bytes(100), "none", setting=TINY)


@pytest.mark.rejects
def test_an_unknown_scheme_is_refused_before_anything_is_trained():
    with pytest.raises(ValueError, match="scheme must be 'none', .* got 'rope'"):
        compare(TEXT, ["none", "rope"], setting=Setting(steps=10**9))


@pytest.mark.rejects
def test_without_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "firstlayer.analysis.position_study.training")
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'firstlayer\[torch\]'"):
        measure(TEXT, "none", setting=TINY)
