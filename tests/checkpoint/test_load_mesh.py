"""Weights straight from files into their shardings, on four simulated devices and on two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmoe import checkpoint
from jmoe.checkpoint import placement
from jmoe.parallel import experts_on

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "tiny-moe" / "bf16"
GPT_OSS = ROOT / "tests" / "data" / "families" / "gpt_oss"
BF16 = ml_dtypes.bfloat16
P = PartitionSpec

# A process of its own may have fewer devices; tests/conftest.py asks for four.
pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def mesh(kind=AxisType.Auto, shape=(2, 2), names=("expert", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(BF16)


def layer(hidden=64, intermediate=96, experts=4):
    """Attention's o_proj and k_proj with a bias, and experts."""
    tensors = {
        "model.layers.0.self_attn.o_proj.weight": normal(hidden, hidden, seed=1),
        "model.layers.0.self_attn.q_proj.weight": normal(hidden, hidden, seed=2),
        "model.layers.0.self_attn.k_proj.weight": normal(10, hidden, seed=3),
        "model.layers.0.self_attn.k_proj.bias": normal(10, seed=4),
        "model.layers.0.self_attn.v_proj.weight": normal(10, hidden, seed=5),
    }
    for e in range(experts):
        tensors[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] = normal(intermediate, hidden, seed=10 + e)
        tensors[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] = normal(intermediate, hidden, seed=20 + e)
        tensors[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] = normal(hidden, intermediate, seed=30 + e)
    return tensors


def written(tmp_path, write_checkpoint, recipe):
    """The folder of that layer, quantized."""
    source = write_checkpoint(layer())
    if recipe == "bf16":
        return source
    checkpoint.quantize_checkpoint(source, tmp_path / "quantized", recipe)
    return tmp_path / "quantized"


def assert_same(found, expected):
    """Equal, array by array, and every device has just its slice."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == whole.dtype
        for shard in mine.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(whole)[shard.index])


@pytest.mark.parametrize(
    "recipe, scale",
    [
        ("bf16", None),
        ("fp8_channel", P("expert", None, "model", None)),
        # 96 rows on two devices are 48 each, and the second block of 32 lies on both; 64 columns are two blocks of 32.
        ("fp8_block:block=32", P("expert", None, None, None)),
        ("fp8_tensor", P("expert", None, None, None)),
        ("mxfp4", P("expert", None, "model", None)),
        ("int4:group=32,zero_point", P("expert", None, "model", None)),
        ("nvfp4_w4a16", P("expert", None, "model", None)),
    ],
)
def test_experts_arrive_in_their_sharding(tmp_path, write_checkpoint, recipe, scale):
    with checkpoint.open(written(tmp_path, write_checkpoint, recipe)) as opened:
        prefix = "model.layers.0.mlp.experts"
        whole = checkpoint.load_experts(opened, prefix)
        found = checkpoint.load_experts(opened, prefix, mesh=mesh(), sharding=("expert", "model", None))
    assert_same(found, whole)
    w13, w2 = found
    data13, data2 = (w if recipe == "bf16" else w.data for w in (w13, w2))
    assert data13.sharding == NamedSharding(mesh(), P("expert", None, "model", None))
    assert data2.sharding == NamedSharding(mesh(), P("expert", None, "model"))
    if scale is not None:
        assert w13.scale.sharding.is_equivalent_to(NamedSharding(mesh(), scale), 4)


def test_linear_layers_and_biases_arrive_in_their_sharding(tmp_path, write_checkpoint):
    with checkpoint.open(written(tmp_path, write_checkpoint, "int4:group=16,scale_dtype=bfloat16")) as opened:
        attention = "model.layers.0.self_attn"
        o_proj = f"{attention}.o_proj"
        on = {"mesh": mesh(), "sharding": ("model", "expert")}
        found = checkpoint.load_linear(opened, o_proj, **on)
        assert_same(found, checkpoint.load_linear(opened, o_proj))
        assert found.data.sharding.spec == found.scale.sharding.spec == P("model", "expert")
        # q has 64 rows, k and v have 10: it is 84 that are split.
        names = [f"{attention}.{name}_proj" for name in "qkv"]
        joined = checkpoint.load_linear(opened, names, **on)
        assert_same(joined, checkpoint.load_linear(opened, names))
        assert joined.data.sharding.spec == P("model", "expert")
        bias = checkpoint.load_bias(opened, f"{attention}.k_proj", **on)
        assert_same(bias, checkpoint.load_bias(opened, f"{attention}.k_proj"))
        assert bias.sharding.spec == P("model")
        with jax.set_mesh(mesh()):  # the mesh in force
            assert_same(checkpoint.load_linear(opened, o_proj, sharding=("model", "expert")), found)


def test_a_sharding_given_as_the_device_is_filled_block_by_block(tmp_path, write_checkpoint, monkeypatch):
    sizes = []
    moved = placement._moved
    monkeypatch.setattr(placement, "_moved", lambda array, target: sizes.append(array.nbytes) or moved(array, target))
    with checkpoint.open(written(tmp_path, write_checkpoint, "bf16")) as opened:
        over = NamedSharding(mesh(), P(("expert", "model")))
        w13, w2 = checkpoint.load_experts(opened, "model.layers.0.mlp.experts", device=over)
    assert {shard.data.shape for shard in w13.addressable_shards} == {(1, 2, 96, 64)}
    # Each of the four blocks, an expert, is in the host's memory by itself.
    assert sizes == 4 * [w13.nbytes // 4] + 4 * [w2.nbytes // 4]


RULES = [
    (r"layers\.\d+\.mlp", ("expert", "model", None)),
    (r".*\.(q|k|v)_proj", ("model", None)),
    (r".*\.o_proj", (None, "model")),
    (r"lm_head", (("expert", "model"), None)),
]


@pytest.mark.parametrize("recipe", ["int4:group=32,zero_point", "mxfp4"])
def test_experts_that_devices_do_not_divide_lie_in_slots_of_which_some_are_spare(tmp_path, write_checkpoint, recipe):
    order = experts_on(4, 3).reshape(-1)  # two slots a device
    assert order.tolist() == [0, 1, 2, 3, -1, -1]
    over = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("expert",))
    with checkpoint.open(written(tmp_path, write_checkpoint, recipe)) as opened:
        prefix = "model.layers.0.mlp.experts"
        whole = checkpoint.load_experts(opened, prefix)
        found = checkpoint.load_experts(opened, prefix, slots=order, mesh=over, sharding=("expert", None, None))
        twice = checkpoint.load_experts(opened, prefix, slots=[3, -1, 3])
    for mine, all_of_it in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(mine[:4], all_of_it)
        assert not np.asarray(mine[4:]).any()
        assert [shard.data.shape[0] for shard in mine.addressable_shards] == [2, 2, 2]
    for mine, all_of_it in zip(jax.tree.leaves(twice), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(mine[0], all_of_it[3])
        np.testing.assert_array_equal(mine[2], all_of_it[3])


TOKENS = np.arange(32, 64, dtype=np.int32).reshape(2, 16)


def logits(model, tokens):
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state: nnx.merge(graphdef, state)(tokens))(state)


@pytest.mark.parametrize("source, kind", [(TINY, AxisType.Auto), (GPT_OSS, AxisType.Explicit)])
def test_a_model_on_a_mesh_computes_what_it_does_on_one_device(source, kind):
    on = mesh(kind)
    model = checkpoint.load_model(source, dtype=jnp.float32, mesh=on, sharding=RULES)
    plain = checkpoint.load_model(source, dtype=jnp.float32)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        assert value.sharding.mesh == on, path
        split = any(variable.get_metadata("out_sharding", None) or ())
        assert value.sharding.is_fully_replicated == (not split), path
        assert split or (path[-1] not in ("w13", "w2") and path[-2:] != ("o_proj", "weight")), path
    with jax.set_mesh(on):
        np.testing.assert_allclose(logits(model, TOKENS), logits(plain, TOKENS), rtol=1e-4, atol=1e-4)


def test_devices_that_do_not_divide_the_heads_are_refused_before_anything_is_read():
    on = {"mesh": mesh(AxisType.Explicit, (4,), ("model",)), "sharding": [(r".*\.k_proj", ("model", None))]}
    says = "sharding splits k_proj over 4 devices along model, but they must divide the 2 key and value heads"
    with pytest.raises(ValueError, match=says):
        checkpoint.load_model(TINY, **on)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rules_quantize_on_the_mesh_as_elsewhere(kind):
    on = {"mesh": mesh(kind), "sharding": RULES[:1]}
    rules = [(r"layers\.1\.mlp", "int4:group=64")]
    found = checkpoint.load_model(TINY, rules=rules, **on).layers[1].mlp
    expected = checkpoint.load_model(TINY, rules=rules).layers[1].mlp
    assert_same((found.qw13, found.qw2), (expected.qw13, expected.qw2))
    assert found.w13.get_value().sharding.spec == P("expert", None, "model", None)


_PROCESS = """
import json, sys
import jax, numpy as np
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from jmoe import checkpoint
from jmoe.checkpoint.reader import Checkpoint

read, whole = set(), Checkpoint.read
Checkpoint.read = lambda self, name: read.add(name) or whole(self, name)
mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
rules = [(r"layers\\.1\\.mlp", "int8_w8a16")]  # each quantizes its own experts
model = checkpoint.load_model(sys.argv[3], rules=rules, mesh=mesh, sharding=[(r".*mlp", ("expert", None, None))])
shards = [(s.index[0].start, np.asarray(s.data, np.float32).sum()) for s in model.layers[0].mlp.w2.addressable_shards]
experts = sorted({int(name.split(".")[5]) for name in read if ".experts." in name})
print(json.dumps({"experts": experts, "sums": {start: float(total) for start, total in shards}}))
"""


def test_every_process_reads_the_experts_of_its_own_devices():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", _PROCESS, port]
    running = [
        subprocess.Popen([*command, rank, str(TINY)], cwd=ROOT, env=env, stdout=-1, stderr=-1, text=True)
        for rank in ("0", "1")
    ]
    try:
        ended = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], ended
    first, second = (json.loads(out[out.rindex('{"experts') :]) for out, _ in ended)
    # What all experts are like is seen from the first.
    assert (first["experts"], second["experts"]) == ([0, 1, 2, 3], [0, 4, 5, 6, 7])
    with checkpoint.open(TINY) as opened:
        _, w2 = checkpoint.load_experts(opened, "model.layers.0.mlp.experts")
    sums = {str(2 * i): float(np.asarray(w2[2 * i : 2 * i + 2], np.float32).sum()) for i in range(4)}
    assert first["sums"] | second["sums"] == pytest.approx(sums, rel=1e-5)


def refusal(tmp_path, write_checkpoint, kind=ValueError, **where):
    with checkpoint.open(write_checkpoint(layer())) as opened, pytest.raises(kind) as caught:
        checkpoint.load_experts(opened, "model.layers.0.mlp.experts", **where)
    return str(caught.value)


@pytest.mark.parametrize(
    "where, says",
    [
        ({"sharding": ("expert", None, None)}, "there is none: pass one"),
        (
            {"mesh": (2, 2), "sharding": ("data", None, None)},
            "names 'data', which is no axis of the mesh; it has expert",
        ),
        ({"mesh": (2, 2), "sharding": ("expert", "expert", None)}, "names the mesh axis 'expert' twice"),
        ({"mesh": (2, 2), "sharding": ("expert",)}, "for each of (experts, intermediate, hidden)"),
        ({"mesh": (2, 2), "device": jax.devices()[0]}, "is given with a mesh or sharding"),
        ({"device": P("expert")}, "device gives P('expert',) for w13, but no mesh is in force"),
        ({"mesh": (1, 3), "sharding": (None, None, "model")}, "w13 of shape (4, 2, 96, 64) cannot be sharded so"),
    ],
)
def test_places_that_there_are_not_are_refused(tmp_path, write_checkpoint, where, says):
    if shape := where.get("mesh"):
        devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
        where = where | {"mesh": jax.sharding.Mesh(devices, ("expert", "model"))}
    assert says in refusal(tmp_path, write_checkpoint, **where)


@pytest.mark.parametrize(
    "slots, error, says",
    [([4], ValueError, "slots names the expert 4, but there are 0 to 3"), ([-1], ValueError, "has no expert")]
    + [(slots, TypeError, "must be a sequence of experts' numbers") for slots in ([0.5], [[0]], 3, "0")],
)
def test_slots_that_are_none_are_refused(tmp_path, write_checkpoint, slots, error, says):
    assert says in refusal(tmp_path, write_checkpoint, error, slots=slots)


def test_a_sharding_of_more_axes_than_there_are_is_refused(tmp_path, write_checkpoint):
    over = NamedSharding(mesh(), P(None, None, None, None, "model"))
    assert "w13 of shape (4, 2, 96, 64) cannot be sharded so" in refusal(tmp_path, write_checkpoint, device=over)


@pytest.mark.parametrize(
    "sharding, error, says",
    [
        ([(r"layers\.9.*", ("expert", None))], ValueError, "sharding rule 0 ('layers\\\\.9.*') decides nothing"),
        ([("(", ("expert", None))], ValueError, "is not a regular expression"),
        ([(".*mlp", ("expert", None))], ValueError, "for each of (experts, intermediate, hidden)"),
        (["lm_head"], TypeError, "sharding rule 0 is 'lm_head'"),
        ([("lm_head", ("data", None))], ValueError, "'data' is no axis of the mesh in force"),
    ],
)
def test_rules_of_sharding_that_are_none_are_refused(sharding, error, says):
    with pytest.raises(error) as caught:
        checkpoint.load_model(TINY, mesh=mesh(), sharding=sharding)
    assert says in str(caught.value)
