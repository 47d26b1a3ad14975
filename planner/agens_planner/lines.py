"""The one table of line names. The arena, the loader and the report ask for lines by these names; they stay stable.

Weight lines end in their storage: `bf16`, `fp16`, `fp32` as stored, `w4`, `w3`, `w2_82` packed at that many bits on
average.
"""

from __future__ import annotations

from fractions import Fraction

DEVICE = "device"
HOST_PINNED = "host_pinned"
HOST_PAGEABLE = "host_pageable"

DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# name (or name before the storage suffix) -> what lives there
LINES: dict[str, str] = {
    # device: what exists before the first tensor
    "runtime.cuda_context": "driver context and the kernels torch loads on first use",
    "runtime.libraries": "our compiled kernels and library workspaces",
    "runtime.workspace": "partial sums of split products, tiles of unpacked weights",
    "runtime.unpack": "without an accelerator: a piece of a packed matrix while it is multiplied",
    "runtime.graphs": "captured graphs: one per batch size and model",
    # device: weights, read once per step
    "weights.mlp": "gate, up and down projections of every layer",
    "weights.attention": "q, k, v, o projections of the softmax layers",
    "weights.kda": "projections of the linear-attention layers",
    "weights.indexer": "block selection of the sparse layers",
    "weights.engram": "value projection of the memory layers",
    "weights.mhc": "stream mixing",
    "weights.small": "norms, convolutions and other vectors, widened to fp32",
    "weights.head": "output head",
    "drafter.weights": "DFlash2 block drafter without its codebooks",
    "drafter.context": "the drafter's K/V window",
    "drafter.scratch": "the drafter's activations and logits",
    "mtp.weights": "MTP head",
    "mtp.context": "the MTP head's K/V window",
    "mtp.scratch": "the MTP head's activations and shortlist logits",
    "vision.weights": "vision tower, resident",
    "vision.staging": "two slots through which the vision tower streams from the host",
    "vision.scratch": "what encoding the largest image needs beyond activations.prefill",
    # device: per sequence
    "state.kda": "recurrent state",
    "state.records": "inputs of the last verify rows, replayed at the next step (deferred commit)",
    "state.conv": "last inputs of the short convolutions",
    "state.ids": "token ids around the write position",
    "kv.window": "K/V ring of the sparse layers: window + prefill chunk",
    "kv.dense": "K/V of the dense layers, whole context",
    "kv.block_keys": "indexer keys, one per block of the sparse layers",
    "kv.index_tail": "indexer keys of the block that is still filling",
    "kv.tables": "page tables",
    "far.resident": "pooled far K/V of the layers kept on the device",
    "far.hot_cache": "recently used far blocks of the host layers",
    "far.staging": "tiles through which prefill reads a host layer's far pool",
    # device: work space
    "activations.prefill": "one prefill chunk through the widest layer",
    "activations.verify": "the verify rows of all sequences",
    "logits.verify": "fp32 logits of the verify rows",
    "sampling.scratch": "probabilities, sorting, penalties and masks of the verify rows",
    "allocator.slack": "rounding of device allocations",
    "reserve.other": "display and other processes, as far as they reach into the cap",
    "reserve.headroom": "planned but unused",
    # host
    "host.runtime": "Python, torch and its libraries",
    "host.load_buffers": "reading and repacking weights at start-up",
    "host.embedding": "token embedding, gathered by row",
    "host.engram_tables": "Engram tables, gathered by row",
    "host.codebooks": "the drafter's selector codebooks",
    "host.far_pool": "pooled far K/V of the layers not kept on the device",
    "host.vision_weights": "vision tower, staged to the device when an image comes",
    "host.vision_features": "encoded image rows waiting for their prefill chunk",
    "host.io": "token ids and masks on their way to the device",
    "host.snapshots": "stored sessions for fast follow-up turns",
    "host.device_lines": "the device lines: without an accelerator they live here too",
    "host.headroom": "left to the rest of the machine",
}

# When page-locked memory is limited, lines are pinned in this order until it is used up; the rest stays pageable.
PIN_ORDER = ("host.io", "host.far_pool", "host.engram_tables", "host.embedding", "host.codebooks",
             "host.vision_features", "host.vision_weights")  # fmt: skip

# These exist for the budget only; the arena never hands them out.
NOT_ALLOCATED = frozenset(
    {
        "runtime.cuda_context",
        "runtime.libraries",
        "runtime.graphs",
        "allocator.slack",
        "reserve.other",
        "reserve.headroom",
    }
)
# What ends a plan when no line does: the model's own context, the planner's most sequences, or just the request.
LIMIT_MODEL_CONTEXT = "limit.model_context"
LIMIT_SEQUENCES = "limit.sequences"
LIMIT_REQUEST = "limit.request"


def storage_name(bits: Fraction | int | None, dtype: str) -> str:
    """`bf16` for unpacked weights, `w4` or `w2_82` for packed ones."""
    if bits is None:
        return DTYPE_NAMES[dtype]
    exact = Fraction(bits)
    text = str(exact.numerator) if exact.denominator == 1 else f"{float(exact):.6g}"
    return "w" + text.replace(".", "_")


def weight_line(kind: str, bits: Fraction | int | None, dtype: str) -> str:
    """The line a weight is charged to: `weights.mlp.w4`. `kind` as shapes.classify gives it.

    Small ones are always fp32.
    """
    return f"weights.{kind}." + ("fp32" if kind == "small" else storage_name(bits, dtype))


def packed_storage(name: str) -> bool:
    """Whether a weight line's storage is a packed width."""
    return name.rpartition(".")[2] not in DTYPE_NAMES.values()


def describe(name: str) -> str:
    """What a line holds; raises KeyError for a name that is not in the table."""
    return LINES[name] if name in LINES else LINES[name.rpartition(".")[0]]
