"""DecoderConfig: what config.json says, and what it must not say."""

import dataclasses
import re

import pytest

from jmoe.backends.activation import swiglu
from jmoe.models import DecoderConfig
from jmoe.models.rope import Yarn

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# The configurations of Mixtral-8x7B and gpt-oss-20b, as far as they describe the model.
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_tiny_checkpoint(tiny_config):
    config = DecoderConfig.from_hf(tiny_config)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (256, 256, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert (config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok) == (256, 8, 2)
    assert config.norm_topk_prob and not config.tie_word_embeddings and not config.attention_bias
    assert (config.rope_theta, config.rms_norm_eps, config.dense_layers) == (1e6, 1e-6, ())
    assert config.routing.top_k == 2 and config.routing.renormalize


def test_the_number_of_experts_under_its_newer_name(tiny_config):
    config = DecoderConfig.from_hf({**tiny_config, "num_experts": None, "num_local_experts": 4})
    assert config.num_experts == 4
    assert DecoderConfig.from_hf({**tiny_config, "num_local_experts": 8}).num_experts == 8


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_local_experts": 4}, "config has num_experts=8 and num_local_experts=4, two names of one number"),
        ({"model_type": "llama"}, "model_type='llama', but this decoder is for 'qwen3_moe' or 'mixtral' or 'gpt_oss'"),
        ({"model_type": []}, "model_type=[], but"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', but this decoder is for 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"type": "yarn"}}, "config has rope_scaling without factor, which rope_type 'yarn' needs"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "config has rope_scaling in which factor=0.5 must be at least 1"),
        ({"rope_scaling": YARN | {"beta_slow": 64.0}}, "beta_fast=32.0 must not be less than beta_slow=64.0"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate=1 must be true or false"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "rope_scaling with mscale=0.7, which this decoder does not know"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta=1.0 must be more than 1 with a rope_scaling"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_type='linear', but this decoder is for 'default' or 'yarn'",
        ),
        ({"num_experts": None}, "config has no num_experts"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_experts": "8"}, "num_experts='8' must be an integer of at least 1"),
        ({"num_experts": 0}, "num_experts=0 must be an integer of at least 1"),
        ({"num_experts": 1}, "num_experts_per_tok=2 is more than num_experts=1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 must be"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads=0 must be"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be"),
        ({"hidden_size": [256]}, "hidden_size=[256] must be"),
        ({"hidden_size": True}, "hidden_size=True must be"),
        ({"vocab_size": -1}, "vocab_size=-1 must be"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob='yes' must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' must be a positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a positive number"),
        ({"rope_theta": "big"}, "rope_theta='big' must be a positive number"),
        ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
        ({"rope_parameters": 3}, "rope_parameters=3, but it is an object"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be"),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1 must be integers"),
        ({"mlp_only_layers": [1], "intermediate_size": None}, "dense_layers=(1,) need an intermediate_size"),
    ],
)
def test_what_it_does_not_have_is_refused_by_key_and_value(tiny_config, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DecoderConfig.from_hf({**tiny_config, **changes})


def test_rope_parameters_of_newer_files_are_read(tiny_config):
    newer = {k: v for k, v in tiny_config.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert DecoderConfig.from_hf(newer).rope_theta == 5000.0


def test_head_dim_defaults_to_an_equal_share(tiny_config):
    assert DecoderConfig.from_hf({k: v for k, v in tiny_config.items() if k != "head_dim"}).head_dim == 64


def test_layers_without_experts(tiny_config):
    # Layers are counted from 1 by decoder_sparse_step: with 2, layers 0 and 2 of 3 are dense.
    assert DecoderConfig.from_hf({**tiny_config, "decoder_sparse_step": 2}).dense_layers == (0, 2)
    assert DecoderConfig.from_hf({**tiny_config, "mlp_only_layers": [1]}).dense_layers == (1,)


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match="config is a list, but it is the object"):
        DecoderConfig.from_hf([])


def test_fields_are_checked_where_a_config_is_made(tiny_config):
    config = DecoderConfig.from_hf(tiny_config)
    with pytest.raises(ValueError, match=re.escape("dense_layers=(3,) names layer 3 of 3")):
        dataclasses.replace(config, dense_layers=(3,), intermediate_size=8)
    with pytest.raises(ValueError, match="rope_theta=nan must be a positive number"):
        dataclasses.replace(config, rope_theta=float("nan"))


def test_mixtral():
    config = DecoderConfig.from_hf(MIXTRAL)
    assert (config.moe_intermediate_size, config.intermediate_size, config.head_dim) == (14336, 0, 128)
    assert (config.num_experts, config.rope_theta, config.rms_norm_eps) == (8, 1e6, 1e-5)
    assert config.routing.renormalize and config.routing.order == "score_topk" and config.activation == swiglu()
    assert not (config.qk_norm or config.attention_bias or config.attention_sinks or config.moe_bias)
    assert config.sliding_layers == ()


def test_a_sliding_window_of_mixtral_is_that_of_every_layer():
    config = DecoderConfig.from_hf(MIXTRAL | {"sliding_window": 4096})
    assert (config.sliding_window, config.sliding_layers) == (4096, tuple(range(32)))


def test_gpt_oss():
    config = DecoderConfig.from_hf(GPT_OSS)
    assert (config.moe_intermediate_size, config.intermediate_size, config.head_dim) == (2880, 0, 64)
    assert config.rope_scaling == Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    assert config.rope_theta == 150000.0
    assert (config.sliding_window, config.sliding_layers) == (128, tuple(range(0, 24, 2)))
    assert config.attention_bias and config.attention_sinks and config.moe_bias and not config.qk_norm
    assert (config.routing.top_k, config.routing.order) == (4, "topk_score")
    assert config.activation == swiglu(1.702, 1.0, 7.0)


def test_windows_of_gpt_oss_alternate_where_the_file_does_not_say():
    layers = DecoderConfig.from_hf({k: v for k, v in GPT_OSS.items() if k != "layer_types"}).sliding_layers
    assert layers == tuple(range(0, 24, 2))


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (MIXTRAL, {"intermediate_size": None}, "config has no intermediate_size, which a mixtral model needs"),
        (MIXTRAL, {"sliding_window": -1}, "sliding_window=-1 must be an integer of at least 0"),
        (MIXTRAL, {"sliding_window": 0}, "need a sliding_window"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "but it is a list of 24, one for each layer"),
        (GPT_OSS, {"layer_types": ["chunked"] * 24}, "layer_types with 'chunked', but this decoder is for"),
        (GPT_OSS, {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5, but this decoder is for 1.702"),
        (GPT_OSS, {"swiglu_limit": -7.0}, "swiglu_limit=-7.0 must be a positive number"),
        (GPT_OSS, {"rope_scaling": None}, "config has no rope_scaling, which a gpt_oss model needs"),
    ],
)
def test_what_mixtral_and_gpt_oss_do_not_have_is_refused(config, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DecoderConfig.from_hf({**config, **changes})


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("model_type", "llama", "model_type='llama' must be 'qwen3_moe' or 'mixtral' or 'gpt_oss'"),
        ("rope_scaling", {"factor": 2}, "must be a jmoe.models.rope.Yarn, or None"),
        ("sliding_layers", (3,), "sliding_layers=(3,) names layer 3 of 3"),
        ("sliding_layers", (1,), "sliding_layers=(1,) need a sliding_window"),
    ],
)
def test_fields_of_other_families_are_checked_too(tiny_config, field, value, message):
    config = DecoderConfig.from_hf(tiny_config)
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(config, **{field: value})
