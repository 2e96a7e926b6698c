"""What only PTX and ptxas tell: products overlap, and unpacked weights stay in registers until they have been read."""

import json
import subprocess
import sys

import pytest

from tests.pallas_kernels import aot
from tests.pallas_kernels.ptx import ptxas, written_early

INT4 = "int4:scale_dtype=bfloat16"
CASES = [
    *((INT4, "qwen3-30b", tokens) for tokens in (32, 512, 2048, 8192)),
    *(("mxfp4_a8", "dsv3-tp8", tokens) for tokens in (32, 512, 2048)),
    *(("mxfp4_a8", "qwen3-30b", tokens) for tokens in (32, 512)),
    (INT4, "mixtral", 1),  # shares of K, here and below
    ("mxfp4", "mixtral", 8),
    ("mxfp4_a8", "mixtral", 8),
    ("mxfp4", "qwen3-30b", 128),
    ("mxfp4", "gpt-oss-120b", 32),
    ("mxfp4", "gpt-oss-120b", 512),  # blocks with a low last one
    ("mxfp4", "gpt-oss-120b", 2048),
    ("nvfp4_w4a16", "mixtral", 2048),
    ("nvfp4_w4a16", "qwen3-30b", 512),
    ("fp8_block", "qwen3-30b", 2048),
    ("fp8_tensor", "mixtral", 128),
    ("bf16", "qwen3-30b", 512),
    ("fp8_w8a16", "qwen3-30b", 2048),
    ("mxfp4", "5760x2880", 16),  # parts of K, and steps that it cuts
    (INT4, "2880x4000", 64),
    ("nvfp4_w4a16", "2880x4000", 64),
    *((recipe, "16384x8100", 64) for recipe in (INT4, "mxfp4_a8", "nvfp4_w4a16")),
    *((recipe, "5760x2880", 256) for recipe in (INT4, "mxfp4", "mxfp4_a8")),
    ("nvfp4_w4a16", "5760x2880", 4096),
    ("fp8_channel", "5760x2880", 16),
]


@pytest.mark.aot
@aot.installed
@pytest.mark.skipif(ptxas() is None, reason="the assembler is not here: pip install nvidia-cuda-nvcc")
@pytest.mark.parametrize("recipe, layer, tokens", CASES)
def test_products_overlap_and_registers_hold_what_is_unpacked(recipe, layer, tokens):
    command = [sys.executable, "-m", "tests.pallas_kernels.ptx", recipe, layer, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found and set(found) <= {"moe_first", "moe_second", "linear_w4", "linear"}
    assert len(found) == (1 if layer[0].isdigit() else 2)
    for kernel in found.values():
        assert not kernel["serialised"] and not kernel["overwritten"], found
        # Promoted sums of high tiles take a few registers more than there are in JAX 0.10's Triton.
        assert kernel["spilled"] == 0 or recipe == "fp8_block", found
        if recipe.startswith(("int4", "mxfp4", "nvfp4")):
            assert kernel["stores"] <= kernel["results"], found


@pytest.mark.parametrize(("early", "overwritten"), [(True, 1), (False, 0)])
def test_operands_that_are_made_while_a_product_reads_them_are_found(early, overwritten):
    """A turn of a loop makes an operand before it waits for the last turn's product, or behind; a copy is of it."""
    made, wait = "\tadd.s32 \t%r1, %r9, 1;", "\twgmma.wait_group.sync.aligned \t0;"
    first = [made, wait] if early else [wait, made]
    product = "\twgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r20,%r21}, {%r2,%r3}, %rd1, 1, 1, 1, 0;"
    assert (
        written_early([*first, "\tmov.b32 \t%r2, %r1;", product, "\twgmma.commit_group.sync.aligned;"]) == overwritten
    )
