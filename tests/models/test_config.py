"""DecoderConfig: what config.json says, and what it must not say."""

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


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mixtral"}, "model_type='mixtral', but this decoder is for 'qwen3_moe'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', but this decoder is for 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling={'type': 'yarn'}, but this decoder is for None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn', but this decoder is for 'default'"),
        ({"num_experts": None}, "config has no num_experts"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
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
