import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jmoe
from jmoe import DeviceSpec, OpSpec, Recipe, Scheme, recipe, select
from jmoe.backends import select as selector
from jmoe.backends.select import IMPLEMENTATIONS, as_device, current_device
from jmoe.backends.spec import DEVICES, Plan, Selection, default_accumulation

LINEAR = OpSpec(op="linear", recipe=recipe("fp8_block"), tokens=8, hidden=256, features=128)
MOE = OpSpec(
    op="moe",
    recipe=recipe("fp8_block"),
    tokens=8,
    hidden=2048,
    experts=128,
    global_experts=128,
    intermediate=768,
    top_k=8,
)


def reason(op, device, name="triton"):
    """Why that implementation does not serve."""
    return {c.implementation: c.reason for c in select(op, device).considered}[name]


def test_the_order_of_preference():
    assert tuple(IMPLEMENTATIONS) == ("triton", "xla", "reference")


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("op", [LINEAR, MOE, MOE.replace(op="batched_experts", top_k=0)])
def test_every_implementation_is_considered_in_order(op, device):
    selection = select(op, device)
    assert [c.implementation for c in selection.considered] == list(IMPLEMENTATIONS)
    accepted = [c.implementation for c in selection.considered if c.accepted]
    assert accepted[0] == selection.implementation
    assert accepted[-1] == "reference"
    assert all(c.reason for c in selection.considered if not c.accepted)
    assert not any(c.reason for c in selection.considered if c.accepted)


@pytest.mark.parametrize("device", ["cpu", "a100", "h200"])
def test_a_selection_is_a_pure_function_of_operation_and_device(device):
    first, second = select(MOE, device), select(MOE, device)
    assert first == second
    assert (first.reason, first.considered) == (second.reason, second.considered)


def test_it_answers_for_devices_that_are_not_here():
    assert {d.platform for d in DEVICES.values()} == {"cuda"}
    assert select(MOE, "h100") == select(MOE, DeviceSpec.named("H100")) == select(MOE, DEVICES["h100"])


def test_the_reason_names_the_implementations_that_were_passed_over():
    selection = select(LINEAR, "cpu")
    assert selection.implementation == "xla"
    assert selection.reason.startswith("first in order that can (triton: it needs an NVIDIA GPU")


# What the Triton implementation says, device by device.


def test_triton_needs_a_gpu_of_compute_capability_8():
    assert reason(LINEAR, "cpu") == "it needs an NVIDIA GPU, and this is cpu"
    assert reason(LINEAR, "t4") == "it needs compute capability 8.0, and NVIDIA T4 has 7.5"


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "mxfp8"])
def test_w8a8_fp8_needs_compute_capability_8_9_and_w8a16_is_there_below(name):
    told = reason(LINEAR.replace(recipe=recipe(name)), "a100")
    assert told == (
        "W8A8 FP8 needs compute capability 8.9, and NVIDIA A100 80GB has 8.0; W8A16 (fp8_w8a16) recipes work there"
    )
    for device in ("l4", "rtx4090", "h100", "b200"):
        assert "W8A8" not in reason(LINEAR.replace(recipe=recipe(name)), device)


@pytest.mark.parametrize("name", ["int4_fp8", "mxfp4_a8", "mxfp4_mxfp8"])
def test_fp8_activations_need_it_too(name):
    told = reason(LINEAR.replace(recipe=recipe(name)), "a100")
    assert told.startswith("an FP8 activation needs compute capability 8.9")
    assert told.endswith("weight-only recipes work there")


@pytest.mark.parametrize("name", ["fp8_w8a16", "int8", "int4", "mxfp4", "nvfp4_w4a16", "bf16"])
def test_what_needs_no_fp8_unit_is_not_refused_for_it(name):
    assert "compute capability" not in reason(LINEAR.replace(recipe=recipe(name)), "a100")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_per_token", "mxfp4_a4"])
def test_fp4_activations_need_fp4_matrix_units(name):
    op = LINEAR.replace(recipe=recipe(name))
    with pytest.raises(ExceptionGroup, match="no implementation serves") as caught:
        select(op, "h200")
    for refusal in caught.value.exceptions:
        told = str(refusal)
        assert "FP4 activations need FP4 matrix units (compute capability 10.0), and NVIDIA H200 has none" in told
    for implementation in ("xla", "reference"):
        assert select(op, "h200", implementation=implementation).implementation == implementation
    for device in ("b200", "rtx5090"):
        assert "FP4" not in reason(op, device)


def test_the_second_products_recipe_counts_as_well():
    mixed = MOE.replace(recipe=recipe("int4"), second_recipe=recipe("fp8_channel"))
    assert reason(mixed, "a100").startswith("W8A8 FP8 needs compute capability 8.9")


@pytest.mark.parametrize(
    "name",
    [
        *("bf16", "fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block", "fp8_w8a16", "int8", "int8_w8a16"),
        *("mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4", "int4:group=32,zero_point", "int4:group=-1"),
        *("int4_fp8", "int4_int8:group=32"),
    ],
)
@pytest.mark.parametrize("op", [LINEAR, MOE], ids=["linear", "moe"])
def test_triton_comes_first_where_its_kernels_serve(op, name):
    assert select(op.replace(recipe=recipe(name)), "h100").implementation == "triton"


@pytest.mark.parametrize(
    "name, told",
    [
        ("int8_w8a16:zero_point", "its kernels take plain, e4m3, symmetric int8 and four-bit weights, and these are "),
        ("mxfp4_mxfp8", "with quantised activations its kernels take int4 weights, and e2m1 ones with e8m0 scales, "),
        ("int4_fp8:group=16", "with quantised activations its int4 groups are of 32 columns or more, not 16"),
        (
            "int4:group=48",
            "its int4 groups are of 16, 32, 64, a multiple of 128, or all columns of one row, not int4 1x48",
        ),
    ],
)
def test_triton_says_which_weights_its_kernels_take(name, told):
    op = LINEAR.replace(recipe=recipe(name))
    assert reason(op, "h100").startswith(told)
    assert select(op, "h100").implementation == "xla"


def test_four_bit_weights_meet_bfloat16_or_are_quantised_for():
    for dtype in ("float16", "float32"):
        op = LINEAR.replace(dtype=dtype)
        told = reason(op.replace(recipe=recipe("mxfp4")), "h100")
        assert told == (
            f"its kernels multiply four-bit weights with bfloat16 activations, and would have to round {dtype} ones"
        )
        assert select(op.replace(recipe=recipe("mxfp4_a8")), "h100").implementation == "triton"


@pytest.mark.parametrize("name", ["int8", "int8_w8a16", "int8_w8a16:group=32"])
def test_int8_needs_no_capability_beyond_that_of_the_kernels(name):
    assert select(LINEAR.replace(recipe=recipe(name)), "a100").implementation == "triton"
    assert "compute capability" in reason(LINEAR.replace(recipe=recipe(name)), "t4")


def test_int8_sums_that_int32_may_not_hold_are_refused():
    op = LINEAR.replace(recipe=recipe("int8"), hidden=131071)
    assert select(op, "h100").implementation == "triton"
    long = op.replace(hidden=131072)
    assert reason(long, "h100") == "K=131072, and sums of int8 products are sure to fit int32 only up to 131071"
    assert select(long.replace(recipe=recipe("int8_w8a16")), "h100").implementation == "triton"


def test_int8_codes_meet_int8_codes_whose_scale_is_measured():
    weight = recipe("int8").weight
    static = Scheme(format="int8", block=(-1, -1), static=True)
    op = LINEAR.replace(recipe=Recipe(name="given", weight=weight, input=static))
    assert reason(op, "h100").startswith("int8 activations with a given scale have nothing to say of one that")
    half = recipe("int8").input.replace(scale_dtype="float16")
    op = LINEAR.replace(recipe=Recipe(name="half", weight=weight, input=half))
    assert reason(op, "h100") == "its kernels measure scales in float32, and an activation's are held in float16"
    op = LINEAR.replace(recipe=Recipe(name="mixed", weight=weight, input=recipe("fp8_channel").input))
    assert reason(op, "h100") == "its kernels multiply codes of one format, not int8 and e4m3"


def test_the_reference_tells_of_experts_where_there_are_any():
    notes = [select(op, "cpu", implementation="reference").note for op in (LINEAR, MOE)]
    assert notes[0] == "float32 definition: for checking, not speed"
    assert notes[1] == "float32 definition, every expert over every token: for checking, not speed"


def test_triton_takes_both_products_of_one_kind():
    mixed = MOE.replace(recipe=recipe("fp8_block"), second_recipe=recipe("bf16"))
    assert reason(mixed, "h100") == "w13 and w2 are of two kinds, and its kernels take one"


def test_a_mesh_is_refused_by_the_names_of_its_axes():
    told = reason(LINEAR.replace(mesh=(("data", 2), ("tp", 4))), "h100")
    assert told.startswith("on a mesh (data=2, tp=4) XLA would gather the weights")
    assert "jax.shard_map" in told


# Choices by name.


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_an_implementation_asked_for_is_taken(name):
    selection = select(MOE, "h100", implementation=name)
    assert (selection.implementation, selection.reason) == (name, "asked for by name")


def test_j06_an_implementation_asked_for_that_cannot_serve_fails_with_its_reason():
    message = (
        r"implementation='triton' cannot serve linear fp8_block M=8 N=128 K=256 bfloat16 on cpu .*: it needs an NVIDI"
    )
    with pytest.raises(NotImplementedError, match=message + r".*; xla and reference can$"):
        select(LINEAR, "cpu", implementation="triton")


def test_j06_an_operation_fails_likewise():
    with pytest.raises(NotImplementedError, match=r"implementation='triton' cannot serve linear bf16"):
        jmoe.linear(jnp.ones((2, 4)), jnp.ones((3, 4)), implementation="triton")


def test_an_unknown_implementation():
    with pytest.raises(
        ValueError, match=r"implementation='cuda' is unknown; it is one of triton, xla, reference, or None"
    ):
        select(LINEAR, "cpu", implementation="cuda")
    with jmoe.config(implementation="cuda"), pytest.raises(ValueError, match=r"implementation='cuda' is unknown"):
        select(LINEAR, "cpu")


def test_the_setting_chooses_where_a_call_does_not():
    with jmoe.config(implementation="reference"):
        assert select(LINEAR, "cpu").implementation == "reference"
        assert select(LINEAR, "cpu", implementation="xla").implementation == "xla"
        selection = jmoe.explain(jmoe.linear, jnp.ones((2, 4)), jnp.ones((3, 4))).entries[0][1]
        assert selection.implementation == "reference"
    with jmoe.config(implementation="triton"), pytest.raises(NotImplementedError, match=r"it needs an NVIDIA GPU"):
        jmoe.linear(jnp.ones((2, 4)), jnp.ones((3, 4)))


def refuse(op, device, *, explicit):
    raise NotImplementedError(f"no {op.op} for {device.name}")


def test_when_none_can_serve_every_reason_is_in_one_group(monkeypatch):
    for module in IMPLEMENTATIONS.values():
        monkeypatch.setattr(module, "plan", refuse)
    with pytest.raises(
        ExceptionGroup, match=r"no implementation serves linear fp8_block .* on NVIDIA H100 80GB"
    ) as group:
        select(LINEAR, "h100")
    assert [str(e) for e in group.value.exceptions] == [
        f"{name}: no linear for NVIDIA H100 80GB" for name in ("triton", "xla", "reference")
    ]
    assert all(type(e) is NotImplementedError for e in group.value.exceptions)
    with pytest.raises(NotImplementedError, match=r"no linear for NVIDIA H100 80GB$"):
        select(LINEAR, "h100", implementation="xla")


def test_a_plan_that_breaks_is_not_taken_for_a_refusal(monkeypatch):
    def broken(op, device, *, explicit):
        raise ZeroDivisionError("tiles")

    monkeypatch.setattr(IMPLEMENTATIONS["triton"], "plan", broken)
    with pytest.raises(ZeroDivisionError):
        select(LINEAR, "cpu")


def test_a_plan_knows_whether_it_was_asked_for_by_name(monkeypatch):
    asked = []
    monkeypatch.setattr(
        IMPLEMENTATIONS["triton"], "plan", lambda op, device, *, explicit: asked.append(explicit) or Plan(launches=2)
    )
    assert select(LINEAR, "h100").launches == 2
    select(LINEAR, "h100", implementation="triton")
    select(LINEAR, "h100", implementation="xla")
    assert asked == [False, True, False]


# Accumulation.


@pytest.mark.parametrize(
    "name, accumulation",
    [
        ("fp8_tensor", "fast"),
        ("fp8_tensor_static", "fast"),
        ("fp8_channel", "fast"),
        ("fp8_block", "exact"),
        ("mxfp8", "exact"),
        ("fp8_w8a16", "exact"),
        ("int8", "exact"),
        ("int4", "exact"),
        ("int4_fp8", "exact"),
        ("mxfp4_a8", "fast"),
        ("mxfp4_mxfp8", "exact"),
        ("nvfp4", "exact"),
        ("bf16", "exact"),
    ],
)
def test_the_default_accumulation_is_fast_for_fp8_with_one_scale_over_k(name, accumulation):
    assert default_accumulation(recipe(name)) == accumulation


@pytest.mark.parametrize(
    "op, seen",
    [
        (LINEAR, "exact"),
        (LINEAR.replace(recipe=recipe("fp8_channel")), "fast"),
        (LINEAR.replace(recipe=recipe("fp8_channel"), accumulation="exact"), "exact"),
        (LINEAR.replace(accumulation="fast"), "fast"),
        (MOE.replace(recipe=recipe("fp8_channel"), second_recipe=recipe("fp8_tensor")), "fast"),
        (MOE.replace(recipe=recipe("fp8_channel"), second_recipe=recipe("fp8_block")), "exact"),
    ],
)
def test_plans_see_the_accumulation_that_is_in_force(monkeypatch, op, seen):
    monkeypatch.setattr(
        IMPLEMENTATIONS["triton"], "plan", lambda op, device, *, explicit: Plan(accumulation=op.accumulation)
    )
    assert select(op, "h100").accumulation == seen


# Devices.


def test_a_jax_device_tells_its_facts():
    spec = DeviceSpec.of(jax.devices()[0])
    assert (spec.platform, spec.compute_capability) == ("cpu", 0)
    assert spec.sm_count >= 1
    assert spec.memory > 2**28
    assert spec == DeviceSpec.named("cpu")
    assert select(LINEAR, jax.devices()[0]) == select(LINEAR, "cpu")


class FakeDevice:
    """What a CUDA device of JAX's looks like."""

    def __init__(self, kind, capability, cores, memory, version="PJRT C API\ncuda 12090"):
        self.platform, self.device_kind = "gpu", kind
        self.compute_capability, self.core_count, self.memory = capability, cores, memory
        self.client = type("Client", (), {"platform_version": version})
        self.asked = 0

    def memory_stats(self):
        self.asked += 1
        return {"bytes_limit": self.memory} if self.memory else None


def test_a_gpu_takes_its_bandwidth_from_the_known_device_that_is_most_like_it():
    spec = DeviceSpec.of(FakeDevice("NVIDIA H200", "9.0", 132, int(105e9)))
    assert (spec.name, spec.platform, spec.compute_capability, spec.sm_count) == ("NVIDIA H200", "cuda", 90, 132)
    assert (spec.memory, spec.bandwidth) == (int(105e9), 3.35e12)  # 105 GB are nearer to the H100's 80 than to 141
    assert DeviceSpec.of(FakeDevice("NVIDIA H200", "9.0", 132, int(130e9))).bandwidth == 4.8e12


def test_a_gpu_that_tells_no_memory_or_is_unknown():
    spec = DeviceSpec.of(FakeDevice("NVIDIA L4", "8.9", 58, 0))
    assert (spec.memory, spec.bandwidth) == (int(24e9), 0.3e12)
    spec = DeviceSpec.of(FakeDevice("NVIDIA New", "12.1", 48, int(1e10)))
    assert (spec.compute_capability, spec.bandwidth) == (121, 0.0)


def test_a_rocm_device_is_no_cuda_device():
    spec = DeviceSpec.of(FakeDevice("AMD MI300X", "9.4", 304, int(192e9), version="PJRT C API\nrocm 60300"))
    assert (spec.platform, spec.compute_capability) == ("rocm", 0)
    assert reason(LINEAR, spec) == "it needs an NVIDIA GPU, and this is AMD MI300X"


def test_a_device_is_asked_for_its_facts_once():
    device = FakeDevice("NVIDIA H100 80GB HBM3", "9.0", 132, int(79e9))
    for _ in range(3):
        DeviceSpec.of(device)
    assert device.asked == 1


def test_matrix_units_by_compute_capability():
    fp8 = {name for name, d in DEVICES.items() if d.has_fp8}
    assert fp8 == {"l4", "l40s", "rtx4090", "h20", "h100", "h200", "b200", "rtx5090"}
    assert {name for name, d in DEVICES.items() if d.has_fp4} == {"b200", "rtx5090"}
    cpu = DeviceSpec.named("cpu")
    assert not cpu.has_fp8
    assert not cpu.has_fp4


def test_names_of_devices():
    assert DeviceSpec.named("H200") is DEVICES["h200"]
    assert DeviceSpec.named("a100-40gb") is DEVICES["a100_40gb"]
    with pytest.raises(ValueError, match=r"device 'h1000' is unknown; known devices are cpu, t4, a100, .*b200"):
        DeviceSpec.named("h1000")
    with pytest.raises(ValueError, match=r"device 'h1000' is unknown"):
        select(LINEAR, "h1000")


@pytest.mark.parametrize("device", [90, jnp.float32, ("h100",)])
def test_what_is_no_device(device):
    with pytest.raises(TypeError, match=r"device=.* must be a DeviceSpec, a JAX device, the name of a known one"):
        as_device(device)


def test_the_current_device_is_that_of_the_setting_first():
    assert current_device() == DeviceSpec.named("cpu")
    with jax.default_device("cpu"), jmoe.config(device="h100"):
        assert current_device() == DEVICES["h100"]
        assert select(LINEAR).considered == select(LINEAR, "h100").considered
        assert select(LINEAR, "cpu").considered != select(LINEAR).considered
    with jmoe.config(device=DEVICES["b200"]):
        assert current_device() == DEVICES["b200"]
    with jmoe.config(device=jax.devices()[0]):
        assert current_device().platform == "cpu"


def test_the_current_device_is_jaxs_default_device_next(monkeypatch):
    seen = []

    def of(device):
        seen.append(device)
        return DeviceSpec(name=str(device), platform="cpu")

    monkeypatch.setattr(selector.DeviceSpec, "of", of)
    last = jax.devices()[-1]
    with jax.default_device(last):
        current_device()
    with jax.default_device("cpu"):
        current_device()
    current_device()
    assert seen == [last, jax.devices("cpu")[0], jax.devices()[0]]


def test_the_environment_sets_defaults():
    program = (
        "import jax.numpy as jnp, jmoe;"
        "print(jmoe.config.device, jmoe.config.implementation, jmoe.config.batch_invariant);"
        "op, selection = jmoe.explain(jmoe.linear, jnp.ones((2, 4)), jnp.ones((3, 4))).entries[0];"
        "print(selection.implementation, op.batch_invariant, jmoe.backends.select.current_device().name)"
    )
    settings = {"JMOE_DEVICE": "h100", "JMOE_IMPLEMENTATION": "reference", "JMOE_BATCH_INVARIANT": "1"}
    environ = {"JAX_PLATFORMS": "cpu", **settings}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["h100 reference True", "reference True NVIDIA H100 80GB"]


# Values.


def test_values_describe_themselves():
    assert LINEAR.describe() == "linear fp8_block M=8 N=128 K=256 bfloat16"
    assert MOE.describe() == "moe fp8_block T=8 H=2048 I=768 E=128 k=8 bfloat16"
    batched = MOE.replace(op="batched_experts", top_k=0)
    assert batched.describe() == "batched_experts fp8_block T=8 H=2048 I=768 E=128 bfloat16"
    assert DEVICES["h200"].describe() == "NVIDIA H200 (sm90, 132 SMs, 141 GB)"


def test_a_selection_is_a_static_argument_and_its_reasons_do_not_count():
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def f(selection, x):
        traced.append(selection)
        return x + 1

    found, asked = select(LINEAR, "cpu"), select(LINEAR, "cpu", implementation="xla")
    assert found.reason != asked.reason
    assert found == asked
    assert hash(found) == hash(asked)
    f(found, 1.0), f(asked, 1.0)
    assert len(traced) == 1
    f(select(LINEAR, "cpu", implementation="reference"), 1.0)
    assert len(traced) == 2


def test_tiles_by_name():
    selection = Selection(implementation="triton", reason="", considered=(), tiles=(("block_m", 64), ("stages", 3)))
    assert (selection.tile("block_m"), selection.tile("stages")) == (64, 3)


def test_a_call_compiles_once_whether_its_implementation_was_found_or_asked_for():
    from jmoe.ops import call

    w = jmoe.quantize(jnp.ones((24, 64)), "fp8_block")
    x = jnp.ones((3, 64))
    jmoe.linear(x, w)
    compiled = call._call._cache_size()
    jmoe.linear(x + 1, jmoe.quantize(jnp.zeros((24, 64)), "fp8_block"))
    jmoe.linear(x, w, implementation=select(LINEAR).implementation)
    assert call._call._cache_size() == compiled
    jmoe.linear(x, w.with_input_scheme(None))
    assert call._call._cache_size() == compiled + 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": -4}, r"tokens=-4 must be an int of at least 0"),
        ({"hidden": 2.5}, r"hidden=2.5 must be an int"),
        ({"dtype": "int9"}, r"dtype='int9' must be bfloat16"),
    ],
)
def test_an_operation_that_cannot_be_is_refused(changes, message):
    facts = {"op": "linear", "recipe": jmoe.recipe("bf16"), "tokens": 4, "hidden": 256, "features": 128} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        OpSpec(**facts)


def test_a_device_without_experts_is_selected_for():
    nothing = MOE.replace(experts=0, tokens=0)
    assert select(nothing, "h200").implementation == "triton"


def test_a_device_is_known_by_the_name_that_it_shows():
    assert DeviceSpec.named("NVIDIA H200") == DeviceSpec.named("h200")


def test_why_is_the_reason_with_the_note():
    op = jmoe.OpSpec(op="linear", recipe=jmoe.recipe("int4:group=48"), tokens=4, hidden=256, features=128)
    selection = jmoe.select(op, "h200")
    assert selection.why == f"{selection.reason}; {selection.note}"
    assert "triton: " in selection.why and "dequantised" in selection.why
