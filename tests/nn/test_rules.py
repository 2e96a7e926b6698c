"""Rules: whole paths, the first match, and no rule without effect."""

import pytest

import jmoe
from jmoe.nn.rules import decide, decide_all

LAYERS = [("layers.0.q_proj",), ("layers.1.q_proj",), ("layers.1.mlp",), ("lm_head",)]


def test_j04_the_first_rule_that_matches_the_whole_path_decides():
    rules = [(r"lm_head", None), (r".*\.mlp", "int4:group=32"), (r"layers\..*", "int8")]
    decisions = decide_all(rules, LAYERS)
    assert [(d.rule, d.recipe and d.recipe.name) for d in decisions.values()] == [
        (2, "int8"),
        (2, "int8"),
        (1, "int4:group=32"),
        (0, None),
    ]


def test_an_expression_must_match_all_of_the_path():
    assert decide([("q_proj", "int8")], "layers.0.q_proj").rule is None
    assert decide([(r"layers\.1", "int8")], "layers.10").rule is None


def test_an_empty_path_or_expression_matches_nothing():
    assert decide([(".*", "int8")], "").rule is None
    with pytest.raises(ValueError, match=r"rule 0 \(''\) matches no layer"):
        decide_all([("", "int8")], LAYERS)


def test_bf16_leaves_a_layer_alone_and_a_recipe_may_be_one():
    assert decide([(".*", "bf16")], "x") == decide([(".*", None)], "x")
    how = jmoe.recipe("int8")
    assert decide([(".*", how)], "x").recipe is how


def test_j04_a_rule_that_matches_nothing_is_refused_with_the_paths_there_are():
    with pytest.raises(ValueError, match=r"rule 1 \('block.*'\) matches no layer; .* 'layers.0.q_proj', .*'lm_head'"):
        decide_all([("lm_head", None), ("block.*", "int8")], LAYERS)


def test_j04_a_rule_behind_a_more_general_one_is_refused():
    with pytest.raises(ValueError, match=r"rule 1 \('lm_head'\) decides nothing: .*'lm_head', is decided by earlier"):
        decide_all([(".*", "int8"), ("lm_head", None)], LAYERS)


def test_what_is_no_expression_or_recipe_is_refused():
    with pytest.raises(ValueError, match=r"rule 0 \('\('\) is not a regular expression"):
        decide_all([("(", "int8")], LAYERS)
    with pytest.raises(ValueError, match="recipe 'int9' is unknown"):
        decide_all([(".*", "int9")], LAYERS)


@pytest.mark.parametrize(
    "rules, message",
    [
        (".*", "rules='.\\*' must be a list of"),
        ({".*": "int8"}, "must be a list of"),
        ((".*", "int8"), "rule 0 is '.\\*', but it is a pair"),
        ([(".*", "int8", 3)], "rule 0 is .* but it is a pair"),
        ([(3, "int8")], "rule 0 is .* but it is a pair"),
        ([(".*", 8)], "recipe=8 must be a Recipe"),
    ],
)
def test_rules_are_pairs(rules, message):
    with pytest.raises(TypeError, match=message):
        decide_all(rules, LAYERS)


def test_any_path_of_a_layer_in_several_places_may_match():
    layers = [("encoder.proj", "decoder.proj"), ("head",)]
    assert decide_all([(r"decoder\.proj", "int8")], layers)["encoder.proj"].rule == 0
    # The first rule that matches any of them decides.
    with pytest.raises(ValueError, match=r"rule 1 .* decides nothing: .*'encoder.proj', is decided by earlier rules"):
        decide_all([(r"encoder\.proj", None), (r"decoder\.proj", "int8")], layers)
    with pytest.raises(ValueError, match=r"layers are 'encoder.proj', 'decoder.proj', 'head'"):
        decide_all([("tail", "int8")], layers)
