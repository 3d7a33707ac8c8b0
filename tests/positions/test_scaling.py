"""Scaling rules: properties, formulas, and comparison with transformers."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from firstlayer.positions.rotary import inverse_frequencies
from firstlayer.positions.scaling import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Scaling,
    YaRN,
    scaling_from,
)

SHORT = tuple(1.0 + 0.05 * i for i in range(32))
LONG = tuple(1.0 + 2.0 * i for i in range(32))
LONGROPE = {"short_factors": SHORT, "long_factors": LONG, "original_length": 4096}
RULES = [
    Linear(factor=4.0),
    NTK(factor=3.0),
    DynamicNTK(factor=2.0, original_length=2048),
    DynamicNTK(factor=2.0, original_length=2048, length=5000),
    YaRN(factor=16.0, original_length=4096),
    YaRN(factor=32.0, original_length=4096, truncate=False),
    YaRN(factor=40.0, original_length=4096, mscale=0.7, mscale_all_dim=0.3),
    YaRN(factor=8.0, original_length=512, beta_fast=20.0, beta_slow=2.0, attention=1.5),
    LongRoPE(**LONGROPE, factor=32.0),
    LongRoPE(**LONGROPE, factor=32.0, length=5000, attention=1.1),
    Llama3(factor=8.0, original_length=8192),
    Llama3(factor=32.0, original_length=1024, low_factor=0.5, high_factor=6.0),
    Proportional(fraction=0.25),
    Proportional(fraction=0.4, factor=2.0),
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def ratio(rule, dim=64, base=10_000.0):
    """Return the ratio of scaled to unscaled frequencies."""
    return rule.inverse_frequencies(dim, base=base) / inverse_frequencies(dim, base=base)


@each_rule
def test_frequencies_never_increase_or_become_negative(rule):
    kept = ratio(rule)
    assert (kept <= 1.0 + 1e-12).all() and (kept >= 0.0).all()
    assert kept.dtype == np.float64 and kept.shape == (32,)


@each_rule
def test_frequencies_depend_on_the_base(rule):
    one, other = (rule.inverse_frequencies(64, base=b) for b in (10_000.0, 500_000.0))
    rotating = one[1:] > 0
    assert (one[1:][rotating] > other[1:][rotating]).all()


@each_rule
def test_rules_survive_json_pickle_and_deepcopy(rule):
    rebuilt = scaling_from(json.loads(json.dumps(rule.to_dict())))
    for same in (rebuilt, pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule)):
        assert same == rule and type(same) is type(rule) and hash(same) == hash(rule)


@each_rule
def test_rules_are_frozen(rule):
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.factor = 2.0


@each_rule
def test_at_length_does_not_mutate_the_rule(rule):
    before = rule.to_dict()
    rule.at_length(100_000)
    assert rule.to_dict() == before


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(ratio(Linear(factor=4.0)), 0.25, rtol=1e-15)


@pytest.mark.parametrize("dim", [4, 64, 128])
def test_ntk_divides_the_lowest_frequency_and_keeps_the_highest(dim):
    kept = ratio(NTK(factor=8.0), dim)
    assert kept[0] == 1.0
    np.testing.assert_allclose(kept[-1], 1 / 8, rtol=1e-12)
    base = 10_000.0 * 8.0 ** (dim / (dim - 2))
    want = base ** (-np.arange(0, dim, 2) / dim)
    got = NTK(factor=8.0).inverse_frequencies(dim, base=10_000.0)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(
    "rule", [NTK(factor=8.0), DynamicNTK(factor=4.0, original_length=8)]
)
def test_ntk_keeps_the_frequency_of_a_single_pair(rule):
    assert rule.at_length(99).inverse_frequencies(2, base=10_000.0).tolist() == [1.0]


@pytest.mark.parametrize("length", [None, 1, 2047, 2048])
def test_dynamic_is_unscaled_up_to_the_original_length(length):
    rule = DynamicNTK(factor=4.0, original_length=2048)
    rule = rule if length is None else rule.at_length(length)
    np.testing.assert_array_equal(ratio(rule), 1.0)


def test_dynamic_depends_on_the_last_length_only():
    rule = DynamicNTK(factor=4.0, original_length=2048)
    direct = ratio(rule.at_length(4096))
    np.testing.assert_array_equal(ratio(rule.at_length(50_000).at_length(4096)), direct)
    assert (direct[1:] < 1.0).all() and (ratio(rule.at_length(2049))[1:] < 1.0).all()
    stretch = 4.0 * 4096 / 2048 - 3.0
    np.testing.assert_array_equal(direct, ratio(NTK(factor=stretch)))


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    rule, dim, base = YaRN(factor=16.0, original_length=4096), 128, 10_000.0
    kept, w = ratio(rule, dim, base), inverse_frequencies(dim, base=base)
    rotations = 4096 * w / (2 * np.pi)
    # Truncation moves each end by less than one pair.
    np.testing.assert_array_equal(kept[rotations > 32 * (w[0] / w[1])], 1.0)
    np.testing.assert_allclose(kept[rotations < w[1] / w[0]], 1 / 16, rtol=1e-12)
    between = (rotations < 32) & (rotations > 1)
    assert (np.diff(kept) <= 0).all()
    assert ((kept[between] < 1) & (kept[between] > 1 / 16)).all() and between.sum() > 20


def test_yarn_without_truncation_blends_exactly_between_the_betas():
    dim, base, length = 64, 150_000.0, 4096
    rule = YaRN(factor=32.0, original_length=length, truncate=False)
    ends = [
        dim * math.log(length / (b * 2 * math.pi)) / (2 * math.log(base)) for b in (32, 1)
    ]
    ramp = np.clip((np.arange(32) - ends[0]) / (ends[1] - ends[0]), 0, 1)
    np.testing.assert_allclose(ratio(rule, dim, base), 1 - ramp + ramp / 32.0, rtol=1e-12)
    truncated = dataclasses.replace(rule, truncate=True)
    assert np.abs(ratio(rule, dim, base) - ratio(truncated, dim, base)).max() > 1e-3


def test_yarn_with_equal_betas_switches_without_blending():
    rule = YaRN(
        factor=4.0, original_length=4096, beta_fast=8.0, beta_slow=8.0, truncate=False
    )
    kept = ratio(rule)
    assert set(kept.round(12)) == {1.0, 0.25}
    assert (kept == 1.0).sum() == math.floor(
        64 * math.log(4096 / (16 * math.pi)) / (2 * math.log(1e4))
    ) + 1


def test_yarn_keeps_all_pairs_if_all_are_fast():
    # Every pair rotates more than beta_fast times.
    np.testing.assert_array_equal(
        ratio(YaRN(factor=4.0, original_length=10**6), 8, 2.0), 1.0
    )


def test_yarn_attention_factors():
    def factor(**options):
        return YaRN(factor=40.0, original_length=4096, **options).attention_factor

    assert factor() == pytest.approx(0.1 * math.log(40) + 1)
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    want = (0.0707 * math.log(40) + 1) / (0.03 * math.log(40) + 1)
    assert factor(mscale=0.707, mscale_all_dim=0.3) == pytest.approx(want)
    assert factor(attention=1.25, mscale=0.7, mscale_all_dim=0.3) == 1.25
    assert YaRN(factor=1.0, original_length=4096).attention_factor == 1.0


def test_attention_factor_follows_a_replaced_factor():
    rule = dataclasses.replace(YaRN(factor=4.0, original_length=4096), factor=16.0)
    assert rule.attention_factor == pytest.approx(0.1 * math.log(16) + 1)


def test_longrope_switches_factors_beyond_the_original_length():
    rule = LongRoPE(**LONGROPE, factor=32.0)
    for short in (rule, rule.at_length(1), rule.at_length(4096)):
        np.testing.assert_allclose(ratio(short), 1 / np.array(SHORT), rtol=1e-14)
    np.testing.assert_allclose(ratio(rule.at_length(4097)), 1 / np.array(LONG), rtol=1e-14)
    back = rule.at_length(9999).at_length(7)
    np.testing.assert_array_equal(ratio(back), ratio(rule))


def test_longrope_attention_factor_is_the_same_at_any_length():
    rule = LongRoPE(**LONGROPE, factor=32.0)
    want = math.sqrt(1 + math.log(32) / math.log(4096))
    assert rule.attention_factor == pytest.approx(want)
    assert rule.at_length(9999).attention_factor == rule.attention_factor
    assert LongRoPE(**LONGROPE, factor=1.0).attention_factor == 1.0
    assert LongRoPE(**LONGROPE, factor=2.0, attention=1.3).attention_factor == 1.3


def test_llama3_blends_by_wavelength():
    rule, base = Llama3(factor=8.0, original_length=8192), 500_000.0
    kept = ratio(rule, 128, base)
    rotations = 8192 * inverse_frequencies(128, base=base) / (2 * np.pi)
    np.testing.assert_array_equal(kept[rotations >= 4], 1.0)
    np.testing.assert_allclose(kept[rotations <= 1], 1 / 8, rtol=1e-12)
    middle = (rotations > 1) & (rotations < 4)
    smooth = (rotations[middle] - 1) / 3
    np.testing.assert_allclose(kept[middle], smooth + (1 - smooth) / 8, rtol=1e-12)
    assert middle.sum() >= 5


def test_proportional_rotates_only_the_fastest_pairs():
    kept = ratio(Proportional(fraction=0.25, factor=2.0))
    assert kept.tolist() == [0.5] * 8 + [0.0] * 24
    assert not Proportional(fraction=0.0).inverse_frequencies(8, base=1e4).any()
    assert (ratio(Proportional(fraction=1.0)) == 1.0).all()


def test_rules_do_not_share_state():
    one, other = YaRN(factor=4.0, original_length=64), YaRN(factor=9.0, original_length=999)
    first = ratio(one).copy()
    ratio(other)
    ratio(other.at_length(5))
    np.testing.assert_array_equal(ratio(one), first)
    assert one != other and one == YaRN(factor=4, original_length=64)


@given(st.floats(1.0, 1e4), st.integers(1, 10**7), st.integers(1, 256))
def test_yarn_and_llama3_are_finite_and_between_the_extremes(factor, length, pairs):
    for rule in (
        YaRN(factor=factor, original_length=length),
        Llama3(factor=factor, original_length=length),
    ):
        kept = ratio(rule, 2 * pairs)
        assert (kept <= 1 + 1e-12).all() and (kept >= 1 / factor - 1e-12).all()


# transformers 5.22.2


def transformers_rule(
    rope_type, parameters, *, theta=10_000.0, length=None, partial=None, **config
):
    assert transformers.__version__ == "5.22.2"
    rope = {"rope_type": rope_type, "rope_theta": theta, **parameters}
    if partial is not None:
        rope["partial_rotary_factor"] = partial
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 16384}
    model_config = LlamaConfig(**{**sizes, **config}, rope_parameters=rope)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](model_config, seq_len=length)
    return frequencies.double().numpy(), float(factor)


def assert_matches(rule, want, *, dim=64, base=10_000.0):
    np.testing.assert_allclose(
        rule.inverse_frequencies(dim, base=base), want[0], rtol=2e-6, atol=1e-12
    )
    assert rule.attention_factor == pytest.approx(want[1], rel=1e-6)


def test_linear_matches_transformers():
    want = transformers_rule("linear", {"factor": 8.0}, theta=1e6)
    assert_matches(Linear(factor=8.0), want, base=1e6)
    half = transformers_rule("linear", {"factor": 8.0}, partial=0.5)
    assert_matches(Linear(factor=8.0), half, dim=32)


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 5000, 100_000])
def test_dynamic_matches_transformers_at_every_length(length):
    limit = {"max_position_embeddings": 2048}
    want = transformers_rule("dynamic", {"factor": 4.0}, length=length, **limit)
    rule = DynamicNTK(factor=4.0, original_length=2048)
    assert_matches(rule.at_length(length), want)
    assert_matches(rule, transformers_rule("dynamic", {"factor": 4.0}, **limit))


YARNS = [
    ({}, {}),
    ({"truncate": False}, {"truncate": False}),
    ({"attention_factor": 1.3}, {"attention": 1.3}),
    ({"mscale": 0.707, "mscale_all_dim": 0.5}, {"mscale": 0.707, "mscale_all_dim": 0.5}),
    ({"beta_fast": 20.0, "beta_slow": 2.0}, {"beta_fast": 20.0, "beta_slow": 2.0}),
    ({"beta_fast": 500.0, "beta_slow": 0.5}, {"beta_fast": 500.0, "beta_slow": 0.5}),
]


@pytest.mark.parametrize("theirs, ours", YARNS)
# The last two blend beyond the last pair, and beyond the last feature.
@pytest.mark.parametrize(
    "theta, factor, length",
    [(1e4, 40.0, 4096), (1.5e5, 32.0, 512), (500.0, 8.0, 4096), (10.0, 8.0, 4096)],
)
def test_yarn_matches_transformers(theirs, ours, theta, factor, length):
    parameters = {"factor": factor, "original_max_position_embeddings": length, **theirs}
    rule = YaRN(factor=factor, original_length=length, **ours)
    assert_matches(rule, transformers_rule("yarn", parameters, theta=theta), base=theta)


@pytest.mark.parametrize("length", [None, 1, 4095, 4096, 4097, 16384])
@pytest.mark.parametrize(
    "theirs, ours", [({}, {}), ({"attention_factor": 1.2}, {"attention": 1.2})]
)
def test_longrope_matches_transformers_below_and_above_the_original_length(
    length, theirs, ours
):
    parameters = {
        "short_factor": list(SHORT),
        "long_factor": list(LONG),
        "original_max_position_embeddings": 4096,
        "factor": 4.0,
        **theirs,
    }
    rule = LongRoPE(**LONGROPE, factor=4.0, **ours)
    rule = rule if length is None else rule.at_length(length)
    assert_matches(rule, transformers_rule("longrope", parameters, length=length))


@pytest.mark.parametrize(
    "factor, low, high, length", [(8.0, 1.0, 4.0, 8192), (32.0, 0.5, 6.0, 512)]
)
def test_llama3_matches_transformers(factor, low, high, length):
    parameters = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
    rule = Llama3(factor=factor, original_length=length, low_factor=low, high_factor=high)
    assert_matches(rule, transformers_rule("llama3", parameters, theta=5e5), base=5e5)


@pytest.mark.parametrize("fraction, factor", [(0.25, 1.0), (0.4, 2.0), (1.0, 1.0)])
def test_proportional_matches_transformers(fraction, factor):
    want = transformers_rule(
        "proportional", {"factor": factor}, partial=fraction, theta=1e6
    )
    assert_matches(Proportional(fraction=fraction, factor=factor), want, base=1e6)


def test_every_transformers_rule_is_covered():
    covered = {"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
    assert set(ROPE_INIT_FUNCTIONS) == covered
    assert torch.get_default_dtype() == torch.float32


# Errors


VALID = {
    Linear: {"factor": 2.0},
    NTK: {"factor": 2.0},
    DynamicNTK: {"factor": 2.0, "original_length": 4096},
    YaRN: {"factor": 2.0, "original_length": 4096},
    LongRoPE: {**LONGROPE, "factor": 2.0},
    Llama3: {"factor": 2.0, "original_length": 4096},
    Proportional: {"fraction": 0.5},
}


@pytest.mark.rejects
@pytest.mark.parametrize("rule", VALID)
@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, math.nan, math.inf])
def test_rejects_a_factor_below_one(rule, factor):
    message = f"factor must be finite and at least 1, got {factor}"
    with pytest.raises(ValueError, match=message):
        rule(**{**VALID[rule], "factor": factor})


@pytest.mark.rejects
@pytest.mark.parametrize(
    "rule, change, message",
    [
        (Linear, {"factor": "4"}, "factor must be a number, got str"),
        (Linear, {"factor": True}, "factor must be a number, got bool"),
        (Linear, {"factor": torch.tensor(True)}, "factor must be a number, got Tensor"),
        (Linear, {"factor": 10**400}, "factor must be a number, got int"),
        (DynamicNTK, {"original_length": 0}, "original_length must be positive, got 0"),
        (DynamicNTK, {"length": 0}, "length must be positive, got 0"),
        (YaRN, {"original_length": 4.5}, "original_length must be an integer, got float"),
        (YaRN, {"beta_slow": 0.0}, "beta_slow must be finite and above 0, got 0.0"),
        (YaRN, {"beta_fast": 0.5}, "beta_fast .* at least beta_slow 1, got 0.5"),
        (YaRN, {"mscale": 1.0}, "mscale_all_dim .* together, got 1.0 and None"),
        (YaRN, {"mscale_all_dim": 1.0}, "mscale_all_dim .* together, got None and 1.0"),
        (YaRN, {"mscale": -1.0}, "mscale must be finite and at least 0, got -1.0"),
        (YaRN, {"attention": 0.0}, "attention must be finite and above 0, got 0.0"),
        (YaRN, {"truncate": 1}, "truncate must be a bool, got int"),
        (LongRoPE, {"long_factors": [1.0]}, "long_factors must have 32 entries .* got 1"),
        (
            LongRoPE,
            {"short_factors": [1.0, 0.0]},
            r"short_factors\[1\] .* above 0, got 0.0",
        ),
        (LongRoPE, {"original_length": 1}, "original_length must be at least 2, got 1"),
        (LongRoPE, {"attention": -1.0}, "attention must be finite and above 0, got -1.0"),
        (LongRoPE, {"length": -3}, "length must be positive, got -3"),
        (Llama3, {"original_length": -1}, "original_length must be positive, got -1"),
        (Llama3, {"low_factor": 0.0}, "low_factor must be finite and above 0, got 0.0"),
        (Llama3, {"high_factor": 0.9}, "high_factor .* at least low_factor 1, got 0.9"),
        (Proportional, {"fraction": 1.5}, "fraction must be at most 1, got 1.5"),
        (Proportional, {"fraction": -0.1}, "fraction .* at least 0, got -0.1"),
    ],
)
def test_rejects_bad_fields(rule, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rule(**{**VALID[rule], **change})


@pytest.mark.rejects
def test_longrope_rejects_the_wrong_number_of_factors():
    rule = LongRoPE(**LONGROPE, factor=2.0)
    message = (
        "short_factors and long_factors must have 16 entries for rotary_dim 32, got 32"
    )
    with pytest.raises(ValueError, match=message):
        rule.inverse_frequencies(32, base=10_000.0)


@pytest.mark.rejects
@each_rule
def test_at_length_rejects_zero(rule):
    with pytest.raises(ValueError, match="n must be positive, got 0"):
        rule.at_length(0)


@pytest.mark.rejects
def test_scaling_from_rejects_unknown_rules_and_fields():
    with pytest.raises(ValueError, match="rule must be 'Linear', .* got 'Cubic'"):
        scaling_from({"rule": "Cubic"})
    want = (
        r"^scaling must have the key 'rule', got \['factor', 'rope_type'\]: "
        r"RotaryPositions.from_hf reads the rope_parameters of a config$"
    )
    with pytest.raises(ValueError, match=want):
        scaling_from({"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(
        ValueError, match=r"Linear must have only \['factor'\], got \['beta'\]"
    ):
        scaling_from({"rule": "Linear", "factor": 2.0, "beta": 1.0})
    with pytest.raises(TypeError, match="scaling must be a rule, a dict or None, got str"):
        scaling_from("yarn")  # pyright: ignore[reportArgumentType]


def test_scaling_from_passes_rules_and_none_through():
    assert scaling_from(None) is None
    assert all(isinstance(rule, Scaling) and scaling_from(rule) is rule for rule in RULES)


@pytest.mark.parametrize("factor", [1.0, 3.7, 1e9, 1e20, 1e30])
def test_dynamic_ntk_changes_nothing_at_the_original_length(factor):
    rule = DynamicNTK(factor=factor, original_length=48)
    plain = inverse_frequencies(16, base=500.0)
    for length in (1, 48):
        at = rule.at_length(length)
        np.testing.assert_array_equal(at.inverse_frequencies(16, base=500.0), plain)
    longer = rule.at_length(96).inverse_frequencies(16, base=500.0)
    np.testing.assert_allclose(longer[-1], plain[-1] / (1 + factor), rtol=1e-12)
