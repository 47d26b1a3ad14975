"""Lines that follow the context, the sequences and the policies: state, KV, far pool, activations, scratch.

Each function returns (name, place, formula) rows. Sizes: spec volundr-model.md section 9, drafters.md A.3 and B.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from agens_planner import constants as c
from agens_planner.formula import Factor, Formula
from agens_planner.lines import DEVICE, HOST_PINNED
from agens_planner.plan import Choice
from agens_planner.profile import Profile
from agens_planner.shapes import Dims, DrafterShapes, ModelShapes, MtpShapes, VisionShapes

Row = tuple[str, str, Formula]


def state_rows(dims: Dims, choice: Choice, element: int) -> Iterator[Row]:
    """Recurrent state, deferred-commit records, convolution tails, ids: fixed per sequence."""
    n, layers = (choice.sequences, "sequences"), (dims.kda_layers, "KDA layers")
    if dims.kda_layers:
        heads: Factor = (dims.kda_value_heads, "heads")
        state = Formula.of(
            n, layers, heads, (dims.kda_key_dim, ""), (dims.kda_value_dim, "values"), (4, "bytes (fp32)")
        )
        yield "state.kda", DEVICE, state
        rows: Factor = (c.VERIFY_ROWS, "rows")
        records = Formula.of(n, layers, rows, (dims.conv_channels, "q, k, v inputs"), (element, "bytes"))
        records += Formula.of(
            n, layers, rows, (dims.kda_gate_width + dims.kda_value_heads, "g and beta"), (4, "bytes (fp32)")
        )
        yield "state.records", DEVICE, records
        tail: Factor = (dims.kda_conv - 1, "positions")
        yield "state.conv", DEVICE, Formula.of(n, layers, tail, (dims.conv_channels, "channels"), (element, "bytes"))
    yield "state.ids", DEVICE, Formula.of(n, (dims.engram_history + c.VERIFY_ROWS, "ids"), (4, "bytes"))


def kv_rows(dims: Dims, profile: Profile, choice: Choice) -> Iterator[Row]:
    """K/V windows, dense K/V, block keys, far pool on both sides of the bus."""
    element, context = profile.element_bytes, choice.context_tokens
    n: Factor = (choice.sequences, "sequences")
    values: Factor = (dims.kv_width, "K and V values")
    count, tokens = pages_of(dims, context)
    pages: Factor = (count, f"pages (context and verify rows, in pages of {tokens})")
    yield "kv.tables", DEVICE, Formula.of(n, pages, (8, "bytes (int64)"))
    if dims.attn_layers:
        positions: Factor = (tokens, "positions")
        size: Factor = _kv_size(choice.fp8_dense, element)
        yield "kv.dense", DEVICE, Formula.of(n, (dims.attn_layers, "dense layers"), pages, positions, values, size)
    if not dims.bcsa_layers:
        return
    layers: Factor = (dims.bcsa_layers, "BCSA layers")
    # A verify step writes a block and its rows at most, a prefill step a chunk: the ring holds the longer of the two.
    written = max(choice.chunk_tokens, dims.compress + c.VERIFY_ROWS)
    ring = min(dims.window + written, context + c.VERIFY_ROWS)
    what = "chunk" if written == choice.chunk_tokens else "block and verify rows"
    ring_text: Factor = (ring, f"ring positions (window {dims.window:,} + {what} {written:,}, at most the context)")
    yield "kv.window", DEVICE, Formula.of(n, layers, ring_text, values, (element, "bytes"))
    far_size: Factor = _kv_size(choice.fp8_far, element)
    keys: Factor = (tokens // dims.compress, "blocks")
    yield "kv.block_keys", DEVICE, Formula.of(n, layers, pages, keys, (dims.index_dim, "values"), far_size)
    tail: Factor = (dims.compress + c.VERIFY_ROWS, "positions")
    yield "kv.index_tail", DEVICE, Formula.of(n, layers, tail, (dims.index_dim, "values"), (element, "bytes"))
    yield from _far_rows(dims, profile, choice, values, far_size)


def pages_of(dims: Dims, context: int) -> tuple[int, int]:
    """(pages of one sequence, positions of a page)."""
    blocks = dims.compress if dims.bcsa_layers else 1
    tokens = -(-c.PAGE_TOKENS // blocks) * blocks
    return -(-(context + c.VERIFY_ROWS) // tokens), tokens


def far_blocks(dims: Dims, context: int) -> int:
    """Blocks that have left the window when the context is full."""
    return max(0, -(-(context - dims.window) // dims.compress)) if dims.bcsa_layers else 0


def _far_rows(dims: Dims, profile: Profile, choice: Choice, values: Factor, size: Factor) -> Iterator[Row]:
    resident = choice.far_resident_layers
    hosted = dims.bcsa_layers - resident
    if not far_blocks(dims, choice.context_tokens):
        return
    n: Factor = (choice.sequences, "sequences")
    pages, tokens = pages_of(dims, choice.context_tokens)
    blocks = pages * (tokens // dims.compress)
    blocks_text: Factor = (blocks, f"blocks (of {dims.compress} positions, whole pages)")
    if resident:
        yield "far.resident", DEVICE, Formula.of((resident, "resident layers"), n, blocks_text, values, size)
    if hosted:
        layers: Factor = (hosted, "host layers")
        hot: Factor = (min(profile.hot_cache_blocks, blocks), "hot blocks")
        cache = Formula.of(layers, n, hot, values, size) + Formula.of(
            layers, n, hot, (c.HOT_TAG_BYTES, "bytes of tags")
        )
        yield "far.hot_cache", DEVICE, cache
        row = int(values[0]) * int(size[0])
        staged = min(max(c.FAR_TILE_BYTES // row, c.FAR_MASKED_FACTOR * dims.topk), blocks)
        tile: Factor = (staged, "blocks (32 MiB, at most one layer's pool)")
        yield "far.staging", DEVICE, Formula.of((2, "tiles"), tile, values, size)
        yield "host.far_pool", HOST_PINNED, Formula.of(layers, n, blocks_text, values, size)


def _kv_size(fp8: bool, element: int) -> Factor:
    return (1 + c.FP8_SCALE_BYTES, "byte (fp8)") if fp8 else (element, "bytes")


def drafter_rows(drafter: DrafterShapes, dims: Dims, choice: Choice, element: int) -> Iterator[Row]:
    """The block drafter's K/V window and scratch; sized from the chosen context, not the trained one."""
    n: Factor = (choice.sequences, "sequences")
    values: Factor = (2 * drafter.kv_heads * drafter.head_dim, "K and V values")
    window = _draft_kv_rows(drafter.window, drafter.block, choice)
    context = Formula.of(n, (drafter.layers - drafter.full_layers, "layers"), window, values, (element, "bytes"))
    if drafter.full_layers:
        full: Factor = (choice.context_tokens + max(drafter.block, c.VERIFY_ROWS), "positions")
        context += Formula.of(n, (drafter.full_layers, "full layers"), full, values, (element, "bytes"))
    yield "drafter.context", DEVICE, context
    width = 4 * drafter.hidden + 3 * drafter.intermediate + 2 * drafter.heads * drafter.head_dim
    rows: Factor = (drafter.block, "block rows")
    scratch = Formula.of(n, rows, (width, "values"), (4, "bytes"))
    scratch += Formula.of(n, (drafter.block - 1, "drafted slots"), (dims.vocab, "logits"), (4, "bytes"))
    scratch += Formula.of(n, (c.VERIFY_ROWS, "rows"), (drafter.taps * dims.hidden, "tap values"), (element, "bytes"))
    yield "drafter.scratch", DEVICE, scratch


def _draft_kv_rows(window: int, block: int, choice: Choice) -> Factor:
    """Rows of a drafter's K/V window: it slides by whole moves, and holds no more than the context and one block."""
    block = max(block, c.VERIFY_ROWS)
    rows = min(window + c.VERIFY_ROWS + block + c.DRAFT_KV_MOVE_ROWS, choice.context_tokens + block)
    return rows, "positions (window, margin, block, room to slide; at most context and block)"


def mtp_rows(mtp: MtpShapes, dims: Dims, profile: Profile, choice: Choice) -> Iterator[Row]:
    """The MTP head's K/V window (any window is valid: drafts never change the output) and scratch."""
    n: Factor = (choice.sequences, "sequences")
    window = _draft_kv_rows(min(choice.context_tokens, profile.mtp_context_tokens), c.VERIFY_ROWS, choice)
    values: Factor = (2 * mtp.kv_heads * mtp.head_dim, "K and V values")
    yield "mtp.context", DEVICE, Formula.of(n, (mtp.layers, "layers"), window, values, (profile.element_bytes, "bytes"))
    width = 5 * mtp.hidden + 3 * mtp.intermediate + 3 * mtp.heads * mtp.head_dim
    scratch = Formula.of(n, (c.VERIFY_ROWS, "rows"), (width, "values"), (4, "bytes"))
    scratch += Formula.of(n, (min(dims.vocab, 2 * c.MTP_SHORTLIST_TOKENS), "shortlist ids and logits"), (8, "bytes"))
    yield "mtp.scratch", DEVICE, scratch


def prefill_formula(shapes: ModelShapes, choice: Choice, element: int, *, drafter: bool) -> Formula:
    """One chunk: streams and layer inputs for all its tokens, plus the widest layer's temporaries."""
    dims = shapes.dims
    chunk = min(choice.chunk_tokens, choice.context_tokens)
    tokens: Factor = (chunk, "tokens")
    base = Formula.of(
        tokens, (dims.streams + 3, "streams and layer inputs"), (dims.hidden, "values"), (element, "bytes")
    )
    if dims.engram_layers:
        base += Formula.of(tokens, (dims.engram_orders * dims.engram_dim, "Engram values"), (element, "bytes"))
    if drafter and shapes.drafter:
        kept = chunk if shapes.drafter.full_layers else min(chunk, shapes.drafter.window)
        base += Formula.of((kept, "tokens"), (shapes.drafter.taps * dims.hidden, "tap values"), (element, "bytes"))
    widest = max(_layer_scratch(dims, choice, tokens, element), key=lambda f: f.value)
    return base + widest


def reference_scratch(dims: Dims, choice: Choice, base: Formula, rows: int) -> Formula:
    """What the torch references need instead of the fused kernels, on a CPU: `base` several times, and score tiles."""
    scores = dims.heads * choice.context_tokens
    tile = max(min(c.REFERENCE_TILE_VALUES, rows * scores), scores) if dims.softmax_layers else 0
    unfused = Formula.of((base.value, "bytes of fused work space"), (c.REFERENCE_COPIES, "copies (unfused)"))
    if dims.softmax_layers:
        keys = min(choice.context_tokens + c.VERIFY_ROWS, c.REFERENCE_KEY_TILE_ROWS)
        far = c.VERIFY_ROWS * dims.topk if dims.bcsa_layers else 0
        read: Factor = (max(keys, far), "rows of K and V read from their pages")
        unfused += Formula.of(read, (dims.kv_width, "values"), (4, "bytes (fp32)"))
    return unfused + Formula.of((tile, "scores of a tile"), (c.REFERENCE_TILE_COPIES, "copies"), (4, "bytes (fp32)"))


def reference_drafting(shapes: ModelShapes, profile: Profile, choice: Choice, name: str, base: Formula) -> Formula:
    """Drafter scratch on a CPU: `base` several times, one sequence's attention, the shortlist's rows of the head."""
    part = shapes.drafter if name == "drafter.scratch" else shapes.mtp
    assert part is not None
    unfused = Formula.of((base.value, "bytes of fused scratch"), (c.REFERENCE_DRAFT_COPIES, "copies (unfused)"))
    rows = max(part.block, c.VERIFY_ROWS) if isinstance(part, DrafterShapes) else 1
    width = part.heads * (rows * c.REFERENCE_TILE_COPIES + 2 * part.head_dim)
    attention = Formula.of((choice.context_tokens + rows, "positions"), (width, "scores and keys"), (4, "bytes (fp32)"))
    if isinstance(part, MtpShapes) and shapes.dims.vocab > c.MTP_SHORTLIST_TOKENS:
        listed: Factor = (c.MTP_SHORTLIST_TOKENS, "shortlist rows of the head")
        attention += Formula.of(listed, (part.hidden, "values"), (profile.element_bytes, "bytes"))
    return unfused + attention


def reference_sampling(dims: Dims, choice: Choice) -> Formula:
    """What the torch sampler of a CPU needs beyond `sampling.scratch` elsewhere: float64 sums, the rules' copies."""
    rows, logits = (c.VERIFY_ROWS, "rows"), (dims.vocab, "logits")
    unfused = Formula.of(
        (choice.sequences, "sequences"), rows, logits, (c.REFERENCE_SAMPLE_BYTES, "bytes (float64 sums)")
    )
    return unfused + Formula.of(rows, logits, (c.REFERENCE_RULE_BYTES, "bytes (one sequence's rules at a time)"))


def _layer_scratch(dims: Dims, choice: Choice, tokens: Factor, element: int) -> Iterator[Formula]:
    """Temporaries of each kind of sub-layer; they follow one another, so only the largest counts."""
    mlp = Formula.of(tokens, (3 * dims.intermediate, "MLP values"), (element, "bytes"))
    yield Formula(mlp.terms, "the MLP is the widest sub-layer")
    if dims.kda_layers:
        yield _kda_scratch(dims, tokens, element)
    if dims.softmax_layers:
        yield _attention_scratch(dims, choice, tokens, element)


def _kda_scratch(dims: Dims, tokens: Factor, element: int) -> Formula:
    gate, out = dims.kda_gate_width, dims.kda_out_width
    wide = Formula.of(tokens, (2 * dims.conv_channels + 2 * out, "KDA values"), (element, "bytes"))
    wide += Formula.of(tokens, (gate + dims.kda_value_heads, "gates"), (4, "bytes (fp32)"))
    tile = min(int(tokens[0]), c.KDA_TILE_TOKENS)
    per_token = 3 * gate + 2 * out + 2 * dims.kda_value_heads * c.KDA_BLOCK_TOKENS
    wide += Formula.of((tile, "scan tokens"), (per_token, "values"), (4, "bytes (fp32)"))
    state = dims.kda_value_heads * dims.kda_key_dim * dims.kda_value_dim
    wide += Formula.of((-(-tile // c.KDA_BLOCK_TOKENS), "scan blocks"), (state, "state values"), (4, "bytes (fp32)"))
    return Formula(wide.terms, "KDA is the widest sub-layer")


def _attention_scratch(dims: Dims, choice: Choice, tokens: Factor, element: int) -> Formula:
    width = (
        (2 if dims.gated else 1) * dims.heads * dims.head_dim + dims.kv_width + (dims.index_heads + 1) * dims.index_dim
    )
    wide = Formula.of(tokens, (width, "attention values"), (element, "bytes"))
    wide += Formula.of(tokens, (dims.heads * (dims.head_dim + 2), "partial outputs"), (4, "bytes (fp32)"))
    if dims.bcsa_layers:
        blocks = -(-choice.context_tokens // dims.compress)
        wide += Formula.of(tokens, (min(dims.topk, blocks), "selected blocks"), (4, "bytes"))
        queries: Factor = (min(int(tokens[0]), c.SELECT_TILE_QUERIES), "queries")
        wide += Formula.of(queries, (blocks, "block scores"), (4, "bytes (fp32)"))
    return Formula(wide.terms, "sparse attention is the widest sub-layer")


def verify_rows(dims: Dims, choice: Choice) -> Iterator[Row]:
    """Fixed buffers of the captured step: all sequences × 8 rows, every sub-layer its own space, fp32."""
    n: Factor = (choice.sequences, "sequences")
    rows: Factor = (c.VERIFY_ROWS, "rows")
    width = (dims.streams + 3) * dims.hidden + 3 * dims.intermediate
    width += 2 * dims.conv_channels + 2 * dims.kda_out_width + dims.kda_gate_width
    width += 3 * dims.heads * dims.head_dim + dims.kv_width + (dims.index_heads + 1) * dims.index_dim
    width += dims.engram_orders * dims.engram_dim
    formula = Formula.of(n, rows, (width, "values"), (4, "bytes"))
    if dims.softmax_layers:
        partial: Factor = (dims.heads * (dims.head_dim + 2), "partial outputs")
        formula += Formula.of(n, rows, (c.SPLIT_KV, "splits"), partial, (4, "bytes"))
    if dims.bcsa_layers:
        blocks: Factor = (-(-choice.context_tokens // dims.compress), "blocks")
        formula += Formula.of(n, rows, blocks, (5, "bytes (score and mask)"))
        formula += Formula.of(n, rows, (dims.topk, "selected blocks"), (4, "bytes"))
    yield "activations.verify", DEVICE, formula
    split: Factor = (c.SPLIT_K, "partial sums")
    workspace = Formula.of(n, rows, split, (dims.hidden, "outputs"), (4, "bytes (fp32)"))
    largest = max(dims.hidden * dims.intermediate, dims.hidden * dims.conv_channels) * 2
    workspace += Formula.of((min(c.UNPACK_TILE_BYTES, 4 * largest), "bytes to unpack weights in prefill"))
    yield "runtime.workspace", DEVICE, workspace
    logits: Factor = (dims.vocab, "logits")
    yield "logits.verify", DEVICE, Formula.of(n, rows, logits, (4, "bytes (fp32)"))
    scratch = Formula.of(n, rows, logits, (16, "bytes (probability, sorted value, sorted index)"))
    scratch += Formula.of(n, logits, (4, "bytes of counts"))
    scratch += Formula.of(n, rows, (-(-dims.vocab // 8), "bytes of mask"))
    yield "sampling.scratch", DEVICE, scratch
    yield "host.io", HOST_PINNED, Formula.of(n, rows, (-(-dims.vocab // 8) + 64, "bytes of mask and ids"))


def vision_rows(vision: VisionShapes, profile: Profile, choice: Choice, prefill_bytes: int) -> Iterator[Row]:
    """The tower (resident, or streamed through two slots), its scratch, and the encoded rows on the host."""
    element = profile.element_bytes
    tower = Formula.of((vision.parameters, "weights"), (element, "bytes"))
    h, patches = vision.hidden, max(1, profile.image_pixels_max // vision.patch**2)
    if choice.vision_staged:
        piece: Factor = (vision.largest_piece, "weights (one block or matrix)")
        yield "vision.staging", DEVICE, Formula.of((2, "slots"), piece, (element, "bytes"))
        yield "host.vision_weights", HOST_PINNED, tower
    else:
        yield "vision.weights", DEVICE, tower
    tile = min(patches, c.VISION_TILE_PATCHES)
    need = Formula.of((patches, "patches"), (3, "residual, K, V"), (h, "values"), (element, "bytes"))
    need += Formula.of((patches, "patches"), (2, "cos and sin"), (h // vision.heads, "values"), (4, "bytes (fp32)"))
    row = 6 * h + vision.intermediate + vision.patch_values + vision.out_hidden
    need += Formula.of((tile, "patches of a tile"), (row, "values"), (element, "bytes"))
    shared = min(need.value, prefill_bytes)
    minus = Formula.of((-1, ""), (shared, "bytes inside activations.prefill, never used at the same time"))
    yield "vision.scratch", DEVICE, need + minus
    features: Factor = (-(-patches // vision.merge**2), "rows of the largest image")
    waiting = Formula.of((choice.sequences, "sequences"), features, (vision.out_hidden, "values"), (element, "bytes"))
    yield "host.vision_features", HOST_PINNED, waiting
