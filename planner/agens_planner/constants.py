"""Every number of the plan that is not a shape: what only a GPU can tell, and what the engine's kernels fix.

The first part is measured by others or by convention and kept on the safe side; `agens doctor` shows the real use
beside it. Change a value here and nowhere else. The second part is shared with the kernels: tile sizes and scratch that
they allocate, as design decisions. The third part feeds the speed forecast only; no byte of memory depends on it.
"""

from __future__ import annotations

from agens_planner.units import MIB

# --- 1. Device overheads that need a GPU to measure; conservative ---------------------------------------------------

# A CUDA context with lazily loaded kernels takes "around 300 MB" with recent drivers (pytorch/pytorch issue 107667);
# half of that again for another driver, a larger GPU and the kernels torch loads on first use.
CUDA_CONTEXT_BYTES = 448 * MIB
# Machine code of our own Triton kernels (about 40 kernels × a few tuned shapes × ~100 KiB) and the cuBLASLt workspace:
# NVIDIA recommends 32 MiB for Hopper and 4 MiB before it (cuBLAS reference, cublasSetWorkspace); 32 covers both.
LIBRARY_BYTES = 64 * MIB
# One captured full-step graph was measured at about 24 MiB (vllm-project/vllm issue 50780); 62 MiB for a whole private
# pool in another report (pull request 51590).
GRAPH_BYTES = 24 * MIB
# torch's caching allocator hands out large blocks in steps of 2 MiB, and aligns small ones to 512 bytes.
ALLOCATION_STEP_BYTES = 2 * MIB
TENSOR_ALIGN_BYTES = 512

# --- Host overheads -------------------------------------------------------------------------------------------------

# Python, torch and its CUDA libraries in resident memory; a fresh `import torch` with a context is near 1 GiB.
HOST_RUNTIME_BYTES = 1536 * MIB
HOST_RUNTIME_CPU_BYTES = 768 * MIB
# WSL2 stops pinning between 500 MB (microsoft/WSL issue 14078) and 0.75 GiB (FlashML-org/FreeToken pull request 233),
# whatever RLIMIT_MEMLOCK says.
WSL_PINNED_BYTES = 512 * MIB

# --- 2. Decisions of the engine's kernels and buffers ---------------------------------------------------------------

PAGE_TOKENS = 128  # positions of a page of sequence memory, rounded up to whole far blocks (agens_engine.memory.pages)
VERIFY_ROWS = 8  # anchor + 7 drafts; the same number as agens_engine.core.NUM_VERIFY_ROWS
PACK_TILE_ROWS = 128  # a packed weight tile is 128 rows × 256 columns; ragged tensors are padded to it
PACK_TILE_COLUMNS = 256
DEFAULT_GROUP = 128  # weights that share one fp16 scale, for what we quantise at load
SCALE_BYTES = 2
KDA_TILE_TOKENS = 512  # the chunked KDA scan walks a prefill chunk in pieces of this many tokens
KDA_BLOCK_TOKENS = 64  # block of the scan: one state is kept per block inside a piece
SELECT_TILE_QUERIES = 64  # queries whose block scores are alive at the same time in prefill
FAR_TILE_BYTES = 32 * MIB  # prefill stages selected blocks of a layer's far pool in two tiles of this size
FAR_MASKED_FACTOR = 4  # up to so many times topk blocks prefill reads all; a tile holds them (attention.GATHER_FACTOR)
UNPACK_TILE_BYTES = 64 * MIB  # prefill unpacks low-bit matrices in tiles of at most this size
SPLIT_KV = 16  # partial results per row in verify attention
SPLIT_K = 17  # partial sums per output in the down projection
HOT_TAG_BYTES = 8  # tag, clock bits and counters per hot-cache block
MTP_SHORTLIST_TOKENS = 32768
DRAFT_KV_MOVE_ROWS = 48  # rows a drafter writes between two moves of its K/V window (agens_engine.model.draft_kv)
MTP_CHAIN_STEPS = 4  # steps of the MTP chain with the block drafter loaded; 7 without
VISION_TILE_PATCHES = 4096  # the vision tower runs its projections in row tiles of this many patches
# On the CPU the torch references run instead of fused kernels: unfused temporaries, float64 sums, and up to three
# copies of a tile of scores (agens_kernels.ref.attention.TILE_ELEMENTS). tests/e2e/test_plan_holds.py holds it.
REFERENCE_COPIES = 4
REFERENCE_TILE_VALUES = 1 << 20
REFERENCE_TILE_COPIES = 3
REFERENCE_KEY_TILE_ROWS = 8192  # keys of a dense layer copied together from their pages (KEY_TILE_ROWS)
# Its sampler holds 24 bytes per row and logit: scores and probabilities in fp32, their float64 copy and its running
# sums. 16 of them are planned for every device, 8 more for each sequence here. Whole-row sorts and draft distributions
# reach 36 bytes (measured), for one sequence at a time. tests/e2e/test_sampling_scratch.py holds it.
REFERENCE_SAMPLE_BYTES = 8
REFERENCE_RULE_BYTES = 16
# A packed matrix that stays packed on the CPU is decoded and multiplied in pieces of at most so many weights (8 tiles);
# the bytes are the most that decoding holds per weight. tests/unit/model/test_lowbit_linear.py holds both.
REFERENCE_UNPACK_VALUES = 1 << 18
REFERENCE_UNPACK_BYTES = 40
# Drafters: unfused temporaries, float64 sums of the walk and its distributions over the whole vocabulary (a block
# drafter without a selector holds 30 bytes per logit). tests/unit/test_engine_drafts.py holds it.
REFERENCE_DRAFT_COPIES = 8
FP8_SCALE_BYTES = 0  # fp8 entries are e4m3 values without scales

# --- 3. Forecast of speed -------------------------------------------------------------------------------------------

# Far blocks that the 8 rows of one step select together, and the share of them found in the hot cache: guesses for this
# model (adjacent steps shared >= 95 % of their blocks for a sparse model of the same kind, vllm-ascend).
FAR_UNION_BLOCKS = 1000
HOT_HIT_RATE = 0.90
# Tokens per verify step, greedy chat: the lowest of the published suites, so the forecast does not flatter.
TOKENS_PER_STEP_DRAFTED = 2.67
