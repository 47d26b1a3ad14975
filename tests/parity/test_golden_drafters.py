"""Both drafters against other people's numbers (tests/data/golden/drafters/README.md): states, walks, chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from agens_engine.model.dflash2 import DFlash2, DraftContext
from agens_engine.model.dflash2_config import BlockLayer
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.drafter_loading import load_dflash2, load_mtp
from agens_engine.model.mtp import Chain, HeadCache, MtpHead
from agens_engine.model.mtp_config import MtpOptions
from agens_kernels.ref.selector import choose, pair_scores
from tests.modelkit import CPU, DATA, golden_model

FOLDER = DATA / "golden" / "drafters"
TOLERANCE = 2e-4
FINE = 2e-5  # context features and q
LENGTHS = (1, 7, 64, 96, 400)
HEAD_LENGTHS = (7, 64, 96)
PIECES = (1, 7, 1000)
TEMPERATURE = 0.8

Golden = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def ends() -> TargetEnds:
    return TargetEnds.of(golden_model())


@cache
def drafter() -> DFlash2:
    return load_dflash2(FOLDER / "dflash2", golden_model().config, device=CPU)


@cache
def head() -> MtpHead:
    return load_mtp(FOLDER / "mtp", golden_model().config, device=CPU)


@pytest.fixture(scope="module")
def dflash2() -> Golden:
    return load_file(FOLDER / "golden_dflash2.safetensors")


@pytest.fixture(scope="module")
def mtp() -> Golden:
    return load_file(FOLDER / "golden_mtp.safetensors")


@cache
def target_run(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Our own target over ids_N: hidden [N, C] after the final norm, taps [N, 3C]."""
    ids = load_file(FOLDER / "golden_dflash2.safetensors")[f"ids_{length}"].long()
    with torch.no_grad():
        batch = golden_model().fresh_batch(ids[None])
        hidden, taps = golden_model()(batch, taps=drafter().config.target_layer_ids)
        return hidden, torch.cat(taps, -1)


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def filled(model: DFlash2, taps: torch.Tensor, piece: int) -> DraftContext:
    context = model.new_context()
    for part in taps.split(piece):
        model.extend([context], [part])
    assert context.length == taps.shape[0]
    return context


def block(model: DFlash2, golden: Golden, length: int, piece: int = 1000) -> torch.Tensor:
    context = filled(model, golden[f"taps_{length}"], piece)
    return model.block([context], golden[f"anchor_{length}"].long(), ends())


# --- DFlash2 ----------------------------------------------------------------------------------------------------------


def test_the_target_supplies_the_stored_taps(dflash2: Golden, mtp: Golden) -> None:
    for length in LENGTHS:
        assert off(target_run(length)[1], dflash2[f"taps_{length}"]) <= TOLERANCE
    for length in HEAD_LENGTHS:
        assert torch.equal(mtp[f"ids_{length}"], dflash2[f"ids_{length}"])
        assert off(target_run(length)[0], mtp[f"target_hidden_{length}"]) <= TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_context_features(dflash2: Golden, length: int) -> None:
    assert off(drafter().features(dflash2[f"taps_{length}"]), dflash2[f"context_{length}"]) <= FINE


def test_context_keys_and_values(dflash2: Golden) -> None:
    context = filled(drafter(), dflash2["taps_7"], 3)
    for layer, kv in enumerate(context.layers):
        keys, values = kv.read(0, 7)
        assert off(keys, dflash2["context_k_7"][layer]) <= TOLERANCE
        assert off(values, dflash2["context_v_7"][layer]) <= TOLERANCE


def test_first_convolution_and_layers(dflash2: Golden) -> None:
    conv = drafter().layers[0].attention_conv
    assert off(conv.prepare(dflash2["conv0_in_7"])[0], dflash2["conv0_prepared_7"]) <= TOLERANCE  # type: ignore[union-attr, operator]
    seen: list[torch.Tensor] = [drafter().embed_block(dflash2["anchor_7"].long(), ends())[0]]
    handles = [layer.register_forward_hook(lambda module, args, out: seen.append(out[0])) for layer in drafter().layers]
    try:
        block(drafter(), dflash2, 7)
    finally:
        for handle in handles:
            handle.remove()
    assert off(torch.stack(seen), dflash2["layers_7"]) <= TOLERANCE


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("length", LENGTHS)
def test_block_hidden(dflash2: Golden, length: int, piece: int) -> None:
    """However the context came in, the block sees the same."""
    hidden = block(drafter(), dflash2, length, piece)
    assert off(hidden[0], dflash2[f"hidden_{length}"]) <= TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_drafts_from_our_own_target(dflash2: Golden, length: int) -> None:
    """Taps from the golden target as this engine runs it, then the whole way to the tokens."""
    context = filled(drafter(), target_run(length)[1], 37)
    anchor = dflash2[f"anchor_{length}"].long()
    hidden = drafter().block([context], anchor, ends())
    assert off(hidden[0], dflash2[f"hidden_{length}"]) <= TOLERANCE
    walk = drafter().walk(drafter().candidates(hidden, ends()), anchor)
    assert walk.tokens[0].tolist() == dflash2[f"greedy_{length}"].tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_candidates_and_scores(dflash2: Golden, length: int) -> None:
    found = drafter().candidates(block(drafter(), dflash2, length), ends())
    assert torch.equal(found.ids[0], dflash2[f"candidates_{length}"].long())
    assert off(found.unary[0], dflash2[f"unary_{length}"]) <= TOLERANCE
    assert found.ids[0, :, 0].tolist() == dflash2[f"argmax_{length}"].tolist()
    selector = drafter().candidate_selector
    assert selector is not None and found.gate is not None
    anchor = dflash2[f"anchor_{length}"].long()
    before = torch.cat((anchor.expand(1, 16), found.ids[0, :-1]))  # [slot, predecessor]
    lattice = pair_scores(
        found.unary[0][:, None],
        found.gate[0][:, None],
        selector.predecessor_codebook[before],
        selector.successor_codebook[found.ids[0]][:, None],
    )
    assert off(lattice, dflash2[f"scores_{length}"]) <= TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_walks(dflash2: Golden, length: int) -> None:
    """Greedy, sampled and tail walk of one length, side by side in one batch."""
    model, anchor = drafter(), dflash2[f"anchor_{length}"].long()
    found = model.candidates(block(model, dflash2, length), ends())
    assert found.gate is not None
    three = dataclasses.replace(
        found, ids=found.ids.repeat(3, 1, 1), unary=found.unary.repeat(3, 1, 1), gate=found.gate.repeat(3, 1, 1)
    )
    walk = model.walk(
        three,
        torch.cat((anchor, anchor, dflash2[f"tail_predecessor_{length}"].long())),
        torch.tensor([0, 0, 3]),
        temperatures=torch.tensor([0.0, TEMPERATURE, 0.0]),
        uniforms=dflash2[f"uniforms_{length}"].double().repeat(3, 1),
    )
    assert walk.ok.all()
    assert walk.tokens[0].tolist() == dflash2[f"greedy_{length}"].tolist()
    assert walk.tokens[1].tolist() == dflash2[f"sampled_{length}"].tolist()
    assert off(walk.q[1], dflash2[f"q_{length}"]) <= FINE
    assert walk.tokens[2].tolist() == [-1, -1, -1, *dflash2[f"tail_greedy_{length}"].tolist()]


def test_sequences_of_different_lengths_in_one_batch(dflash2: Golden) -> None:
    """Batching and a rejected block in between change nothing."""
    model = drafter()
    contexts = [model.new_context() for _ in LENGTHS]
    taps = [dflash2[f"taps_{n}"] for n in LENGTHS]
    early = [max(1, t.shape[0] - 5) for t in taps]
    model.extend(contexts, [t[:n] for t, n in zip(taps, early, strict=True)])
    model.block(contexts, torch.arange(len(LENGTHS)), ends())  # drafts that are all refused
    model.extend(contexts, [t[n:] for t, n in zip(taps, early, strict=True)])
    anchors = torch.cat([dflash2[f"anchor_{n}"] for n in LENGTHS]).long()
    hidden = model.block(contexts, anchors, ends())
    walk = model.walk(model.candidates(hidden, ends()), anchors)
    for row, length in enumerate(LENGTHS):
        assert off(hidden[row], dflash2[f"hidden_{length}"]) <= TOLERANCE
        assert walk.tokens[row].tolist() == dflash2[f"greedy_{length}"].tolist()


def test_a_context_cut_to_the_window_is_enough(dflash2: Golden) -> None:
    """Only the last window - 1 rows matter; one row fewer is seen."""
    model, anchor, expected = drafter(), dflash2["anchor_400"].long(), dflash2["hidden_400"]
    for rows, fits in ((47, True), (46, False)):
        context = model.new_context()
        context.restart(400 - rows)
        model.extend([context], [dflash2["taps_400"][400 - rows :]])
        assert (off(model.block([context], anchor, ends())[0], expected) <= TOLERANCE) == fits


# each must move hidden_400 by more than the table of the README says a mistake of this kind moves it, halved
NETWORK_MISTAKES: dict[str, tuple[Callable[[DFlash2, Golden], torch.Tensor], float]] = {}


def mistake(name: str, least: float) -> Callable[[Callable[[DFlash2, Golden], torch.Tensor]], None]:
    def register(run: Callable[[DFlash2, Golden], torch.Tensor]) -> None:
        NETWORK_MISTAKES[name] = (run, least)

    return register


def variant(**changes: object) -> DFlash2:
    model = DFlash2(dataclasses.replace(drafter().config, **changes))  # type: ignore[arg-type]
    model.load_state_dict(drafter().state_dict())
    return model.requires_grad_(False)


@mistake("window one wider", 0.3)
def _wider(model: DFlash2, golden: Golden) -> torch.Tensor:
    return block(variant(layers=(BlockLayer(49, False),) * 2), golden, 400)


@mistake("window one narrower", 0.3)
def _narrower(model: DFlash2, golden: Golden) -> torch.Tensor:
    return block(variant(layers=(BlockLayer(47, False),) * 2), golden, 400)


@mistake("no window", 2.0)
def _no_window(model: DFlash2, golden: Golden) -> torch.Tensor:
    return block(variant(layers=(BlockLayer(None, False),) * 2), golden, 400)


@mistake("causal inside the block", 2.0)
def _causal(model: DFlash2, golden: Golden) -> torch.Tensor:
    return block(variant(layers=(BlockLayer(48, True),) * 2), golden, 400)


@mistake("eps 1e-5", 0.8)
def _eps(model: DFlash2, golden: Golden) -> torch.Tensor:
    return block(variant(rms_eps=1e-5), golden, 400)


@mistake("wrong mask id", 0.5)
def _mask(model: DFlash2, golden: Golden) -> torch.Tensor:
    return block(variant(mask_token_id=509), golden, 400)


@mistake("block of 7", 0.5)
def _short(model: DFlash2, golden: Golden) -> torch.Tensor:
    hidden = block(variant(block_size=7), golden, 400)
    return torch.cat((hidden, hidden[:, -1:]), 1)


@mistake("taps in reverse order", 2.0)
def _reversed(model: DFlash2, golden: Golden) -> torch.Tensor:
    taps = golden["taps_400"].unflatten(-1, (3, -1)).flip(-2).flatten(-2)
    return model.block([filled(model, taps, 1000)], golden["anchor_400"].long(), ends())


@mistake("context misses its last token", 0.2)
def _misses(model: DFlash2, golden: Golden) -> torch.Tensor:
    context = filled(model, golden["taps_400"][:-1], 1000)
    context.length += 1
    context.layers[0].write(399, *(x * 0 for x in context.layers[0].read(398, 399)))
    context.layers[1].write(399, *(x * 0 for x in context.layers[1].read(398, 399)))
    return model.block([context], golden["anchor_400"].long(), ends())


@mistake("positions start at P - 1", 0.8)
def _position(model: DFlash2, golden: Golden) -> torch.Tensor:
    context = filled(model, golden["taps_400"], 1000)
    context.length -= 1
    return model.block([context], golden["anchor_400"].long(), ends())


@mistake("conv taps swapped", 2.0)
def _conv_taps(model: DFlash2, golden: Golden) -> torch.Tensor:
    wrong = variant()
    for name, parameter in wrong.named_parameters():
        if name.endswith("base_kernel"):
            parameter.copy_(parameter.flip(1))
    return block(wrong, golden, 400)


@pytest.mark.parametrize("name", NETWORK_MISTAKES)
def test_a_mistake_in_the_network_is_seen(dflash2: Golden, name: str) -> None:
    """The comparisons above must be able to fail."""
    run, least = NETWORK_MISTAKES[name]
    assert off(run(drafter(), dflash2)[0], dflash2["hidden_400"]) > least


def test_a_mistake_in_the_walk_is_seen(dflash2: Golden) -> None:
    """Wrong predecessors, dropped pair scores, another temperature, swapped codebooks: tokens and q differ."""
    model, changed = drafter(), dict.fromkeys(("predecessor", "no pair score", "codebooks", "q", "rows"), 0)
    swapped = variant()
    assert swapped.candidate_selector is not None and model.candidate_selector is not None
    swapped.candidate_selector.predecessor_codebook.copy_(model.candidate_selector.successor_codebook)
    swapped.candidate_selector.successor_codebook.copy_(model.candidate_selector.predecessor_codebook)
    for length in LENGTHS:
        anchor, stored = dflash2[f"anchor_{length}"].long(), dflash2[f"greedy_{length}"]
        hidden = block(model, dflash2, length)
        found = model.candidates(hidden, ends())
        last = dflash2[f"ids_{length}"][-1:].long()

        def count(tokens: torch.Tensor, stored: torch.Tensor = stored) -> int:
            return int((tokens[0] != stored).sum())

        changed["predecessor"] += count(model.walk(found, last).tokens)
        changed["no pair score"] += count(model.walk(dataclasses.replace(found, gate=None), anchor).tokens)
        changed["codebooks"] += count(swapped.walk(found, anchor).tokens)
        shifted = model.candidates(torch.cat((hidden[:, :1], hidden[:, :-1]), 1), ends())  # rows 0 .. 6
        changed["rows"] += count(model.walk(shifted, anchor).tokens)
        uniforms = dflash2[f"uniforms_{length}"].double()[None]
        warm = model.walk(found, anchor, temperatures=torch.tensor([0.7]), uniforms=uniforms)
        changed["q"] += int(off(warm.q[0], dflash2[f"q_{length}"]) > 100 * FINE)
    assert all(changed.values()), changed
    assert changed["no pair score"] == 25 and changed["predecessor"] == 4  # the README counts the same


def test_the_uniform_rule_is_the_stored_one(dflash2: Golden) -> None:
    """index = number of cumulative sums of the stored q at or below the uniform."""
    for length in LENGTHS:
        q, uniforms = dflash2[f"q_{length}"], dflash2[f"uniforms_{length}"].double()
        index, again = choose(q.log(), torch.ones(7), uniforms)
        tokens = dflash2[f"candidates_{length}"].gather(1, index[:, None])[:, 0]
        assert torch.equal(tokens, dflash2[f"sampled_{length}"])
        assert off(again, q) <= 1e-6


# --- MTP --------------------------------------------------------------------------------------------------------------


def next_ids(golden: Golden, length: int) -> torch.Tensor:
    return torch.cat((golden[f"ids_{length}"][1:], golden[f"next_{length}"])).long()


def committed(model: MtpHead, golden: Golden, length: int, piece: int, hidden: torch.Tensor | None = None) -> HeadCache:
    cache = model.new_cache()
    states = golden[f"target_hidden_{length}"] if hidden is None else hidden
    for h, ids in zip(states.split(piece), next_ids(golden, length).split(piece), strict=True):
        model.commit([cache], [h], [ids], ends())
    assert cache.length == length
    return cache


def assert_chain(golden: Golden, length: int, chain: Chain) -> None:
    assert chain.ok
    assert list(chain.tokens) == golden[f"chain_tokens_{length}"].tolist()
    assert off(chain.hidden, golden[f"chain_hidden_{length}"]) <= TOLERANCE
    assert off(ends().head(chain.hidden), golden[f"chain_logits_{length}"]) <= TOLERANCE


@pytest.mark.parametrize("length", HEAD_LENGTHS)
def test_teacher_forced(mtp: Golden, length: int) -> None:
    s = head()(mtp[f"target_hidden_{length}"][None], next_ids(mtp, length)[None], ends())[0]
    assert off(s, mtp[f"hidden_{length}"]) <= TOLERANCE
    logits = ends().head(s)
    assert off(logits, mtp[f"logits_{length}"]) <= TOLERANCE
    assert torch.equal(logits.argmax(-1), mtp[f"logits_{length}"].argmax(-1))


def test_joined_input_and_state_before_the_norm(mtp: Golden) -> None:
    model, ids = head(), next_ids(mtp, 7)
    u = model.joined(mtp["target_hidden_7"], ends().embed(ids))
    assert off(u, mtp["fc_7"]) <= TOLERANCE
    rope = model.rope(torch.arange(7))
    attended = model.layer.self_attn.whole_sequences(model.layer.input_layernorm(u)[None], rope)[0]
    assert off(model.layer.finish(u, attended), mtp["prenorm_7"]) <= TOLERANCE


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("length", HEAD_LENGTHS)
def test_chain_after_commits_of_any_size(mtp: Golden, length: int, piece: int) -> None:
    cache = committed(head(), mtp, length, piece)
    assert_chain(mtp, length, head().chain([cache], [7], ends())[0])


@pytest.mark.parametrize("length", HEAD_LENGTHS)
def test_chain_from_our_own_target(mtp: Golden, length: int) -> None:
    cache = committed(head(), mtp, length, 1000, target_run(length)[0])
    assert_chain(mtp, length, head().chain([cache], [7], ends())[0])


def test_every_committed_row_is_the_stored_one(mtp: Golden) -> None:
    """Row by row, with a chain of temporary rows between any two commits."""
    model, cache = head(), head().new_cache()
    for t, (hidden, token) in enumerate(zip(mtp["target_hidden_64"], next_ids(mtp, 64), strict=True)):
        model.commit([cache], [hidden[None]], [token[None]], ends())
        assert cache.newest is not None
        assert off(cache.newest[1], mtp["hidden_64"][t]) <= TOLERANCE, t
        model.chain([cache], [3], ends())
    assert_chain(mtp, 64, model.chain([cache], [7], ends())[0])


def test_sequences_in_one_batch_with_given_tokens(mtp: Golden) -> None:
    """Given the first tokens of the stored chain, the head drafts the rest of it, whatever its neighbours do."""
    model = head()
    caches = [committed(model, mtp, n, 50) for n in HEAD_LENGTHS]
    num_given = {7: 3, 64: 0, 96: 6}
    stored = {n: mtp[f"chain_tokens_{n}"].tolist() for n in HEAD_LENGTHS}
    chains = model.chain(
        caches,
        [4, 5, 1],
        ends(),
        given=[stored[n][: num_given[n]] for n in HEAD_LENGTHS],
    )
    for n, want, chain in zip(HEAD_LENGTHS, (4, 5, 1), chains, strict=True):
        rows = slice(num_given[n], num_given[n] + want)
        assert list(chain.tokens) == stored[n][rows]
        assert off(ends().head(chain.hidden), mtp[f"chain_logits_{n}"][rows]) <= TOLERANCE


HEAD_MISTAKES = {
    "hidden first": ({"concat": "hidden_first"}, 3.0),
    "pre-norm chain": ({"chain_state": "pre_norm"}, 1.0),
    "plain norms": ({"norm_form": "plain"}, 3.0),
}


@pytest.mark.parametrize("name", HEAD_MISTAKES)
def test_a_wrong_convention_of_the_head_is_seen(mtp: Golden, name: str) -> None:
    changes, least = HEAD_MISTAKES[name]
    wrong = load_mtp(FOLDER / "mtp", golden_model().config, device=CPU, options=MtpOptions(**changes))  # type: ignore[arg-type]
    cache = committed(wrong, mtp, 96, 1000)
    given = mtp["chain_tokens_96"].tolist()
    # the stored tokens fed in, so that steps are compared and not their consequences
    states = [wrong.chain([cache], [1], ends(), given=[given[:k]])[0].hidden[0] for k in range(7)]
    assert off(ends().head(torch.stack(states)), mtp["chain_logits_96"]) > least


def test_a_misplaced_chain_is_seen(mtp: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chained rows one position too far change 12 of 21 tokens, as the README counts."""
    model, changed = head(), 0
    for length in HEAD_LENGTHS:
        cache = committed(model, mtp, length, 1000)
        with monkeypatch.context() as patch:
            patch.setattr(model, "rope", lambda positions: MtpHead.rope(model, positions + 1))
            tokens = model.chain([cache], [7], ends())[0].tokens
        changed += sum(a != b for a, b in zip(tokens, mtp[f"chain_tokens_{length}"].tolist(), strict=True))
    assert changed == 12
