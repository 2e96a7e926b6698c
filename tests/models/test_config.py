"""DecoderConfig: what config.json says, and what it must not say."""

import dataclasses
import re

import pytest

from jmoe.models import DecoderConfig


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
        ({"model_type": "mixtral"}, "model_type='mixtral', but this decoder is for 'qwen3_moe'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', but this decoder is for 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling={'type': 'yarn'}, but this decoder is for None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn', but this decoder is for 'default'"),
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
