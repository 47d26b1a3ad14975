"""Training data of nano's drafters: documents that nano itself finished greedily, with what it computed over them.

A folder per seed:
    documents.npz   ids [N] uint16        whole documents end to end, the last assistant turn written by nano
                    predicted [N] uint16  nano's greedy token after each position
                    turn_end [N] int32    where the token is generated: the last position of its turn, else -1 (both
                                          counted from the start of the document)
                    offsets [D + 1] int64, kinds [D] uint8, kind_names [K], thinking [D] bool
    states.npy      [N, (n_taps + 1) * C] float16: stream 0 after each tapped layer, then the state after the final norm

An earlier turn keeps the generator's words. It still teaches nano's own tokens: a target counts only while the words
before it are the ones nano would have chosen (`Documents.targets`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from agens_engine.model.volundr import Volundr
from scripts.nano.corpus import MIX, Mixer, make_document
from scripts.nano.dataset import MAX_DOCUMENT_TOKENS, generated_flags, load_tokenizer
from scripts.nano.generation import greedy_backend
from scripts.nano.lexicon import Sampler
from scripts.nano.rendering import render_text
from scripts.nano.train import LENGTH_STEP

TAPS = (0, 2, 4)
# percent of tokens; more chat and Python than nano's own mix, whose short answers would hardly be seen otherwise
DRAFTER_MIX = {"tools": 22, "copying": 10, "arithmetic": 18, "agent": 18, "json": 8, "chat": 14, "python": 10}
EARLY_TURN_SHARE = 0.4  # of the documents with several assistant turns: cut behind one of them
MAX_NEW_TOKENS = 320
FORWARD_TOKENS = 4096  # per forward pass, padding included
PIECE_DOCUMENTS = 256  # finished together


@dataclass
class Drawn:
    """One document on its way: ids up to the end of an assistant turn, and where each token's turn ends (or -1)."""

    ids: list[int]
    kind: str
    thinking: bool
    turn_end: np.ndarray

    @property
    def last_turn_start(self) -> int:
        return int(np.flatnonzero(self.turn_end == self.turn_end[-1])[0])

    def replace_last_turn(self, answer: list[int]) -> None:
        start = self.last_turn_start
        self.ids = self.ids[:start] + answer
        ends = np.full(len(answer), len(self.ids) - 1, np.int32)
        self.turn_end = np.concatenate([self.turn_end[:start], ends])


@dataclass(frozen=True)
class Anchors:
    """B documents, padded to T tokens, with A anchors each and S draft slots after every anchor.

    ids        [B, T] int64
    taps       [B, T, n_taps * C] and hidden [B, T, C] float32
    positions  [B, A] int64, the anchors' positions; the anchor has been chosen but not run
    targets    [B, A, S] int64, nano's greedy tokens at positions + 1 ..
    valid      [B, A, S] bool, False behind the end of the turn and behind a word that nano would not have chosen
    """

    ids: torch.Tensor
    taps: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor


class Documents:
    """The documents of one or more folders, as batches of anchors."""

    def __init__(self, folders: Sequence[Path]) -> None:
        files = [np.load(folder / "documents.npz") for folder in folders]
        self.states = [np.load(folder / "states.npy", mmap_mode="r") for folder in folders]
        self.where = [(part, d) for part, file in enumerate(files) for d in range(len(file["offsets"]) - 1)]
        self.kind_names = [str(name) for name in files[0]["kind_names"]]
        self.kinds = np.concatenate([file["kinds"] for file in files])
        self.thinking = np.concatenate([file["thinking"] for file in files])
        self.arrays = [
            {key: file[key].astype(np.int64) for key in ("ids", "predicted", "turn_end", "offsets")} for file in files
        ]
        self.width = self.states[0].shape[1] // (len(TAPS) + 1)

    def __len__(self) -> int:
        return len(self.where)

    def column(self, doc: int, key: str) -> np.ndarray:
        part, d = self.where[doc]
        offsets = self.arrays[part]["offsets"]
        return self.arrays[part][key][offsets[d] : offsets[d + 1]]

    def last_turn(self, doc: int) -> np.ndarray:
        """Positions that can be anchors in the turn nano wrote: all its tokens but the last."""
        end = self.column(doc, "turn_end")
        positions = np.flatnonzero(end == end[-1])
        return positions[positions < end[-1]]

    def any_turn(self, doc: int) -> np.ndarray:
        """Positions that can be anchors in any assistant turn."""
        end = self.column(doc, "turn_end")
        return np.flatnonzero(end > np.arange(len(end)))

    def targets(self, doc: int, anchors: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """(targets, valid) [len(anchors), slots] of one document."""
        ids, predicted, turn_end = (self.column(doc, key) for key in ("ids", "predicted", "turn_end"))
        at = anchors[:, None] + np.arange(slots)  # slot e is predicted at this position, and stands one further
        inside = at < turn_end[anchors][:, None]
        at = np.minimum(at, len(ids) - 1)
        followed = np.concatenate([np.zeros(1, bool), ids[1:] == predicted[:-1]])[at]
        followed[:, 0] = True  # the anchor itself is given
        return predicted[at], inside & np.logical_and.accumulate(followed, 1)

    def batch(self, docs: Sequence[int], anchors: Sequence[np.ndarray], slots: int) -> Anchors:
        """anchors: one array per document; shorter ones are padded with anchors whose slots are all invalid."""
        length, most = max(len(self.column(d, "ids")) for d in docs), max(map(len, anchors))
        ids = np.zeros((len(docs), length), np.int64)
        states = np.zeros((len(docs), length, (len(TAPS) + 1) * self.width), np.float32)
        positions = np.ones((len(docs), most), np.int64)
        targets = np.zeros((len(docs), most, slots), np.int64)
        valid = np.zeros((len(docs), most, slots), bool)
        for row, (doc, chosen) in enumerate(zip(docs, anchors, strict=True)):
            part, d = self.where[doc]
            begin, stop = self.arrays[part]["offsets"][d : d + 2]
            ids[row, : stop - begin] = self.column(doc, "ids")
            states[row, : stop - begin] = self.states[part][begin:stop]
            positions[row, : len(chosen)] = chosen
            targets[row, : len(chosen)], valid[row, : len(chosen)] = self.targets(doc, chosen, slots)
        both = torch.from_numpy(states)
        return Anchors(
            torch.from_numpy(ids),
            both[..., : -self.width],
            both[..., -self.width :],
            torch.from_numpy(positions),
            torch.from_numpy(targets),
            torch.from_numpy(valid),
        )

    def epoch(self, seed: int, number: int, num_docs: int, num_anchors: int, slots: int) -> Iterator[Anchors]:
        """All documents once, in batches of similar length, with random anchors in each."""
        rng = np.random.default_rng((seed, number))
        order = rng.permutation(len(self))
        for begin in range(0, len(order), 64 * num_docs):
            group = sorted(order[begin : begin + 64 * num_docs], key=lambda doc: len(self.column(doc, "ids")))
            batches = [group[at : at + num_docs] for at in range(0, len(group), num_docs)]
            for i in rng.permutation(len(batches)):
                docs = [doc for doc in batches[i] if len(self.any_turn(doc))]
                if docs:
                    chosen = [_some(rng, self.any_turn(doc), num_anchors) for doc in docs]
                    yield self.batch(docs, chosen, slots)


def _some(rng: np.random.Generator, choices: np.ndarray, num: int) -> np.ndarray:
    return choices if len(choices) <= num else np.sort(rng.choice(choices, num, replace=False))


# --- making them ------------------------------------------------------------------------------------------------------


def make_folder(model: Volundr, out: Path, *, seed: int, split: str, num_tokens: int, mix: Mapping[str, float]) -> int:
    """Write one folder of at least num_tokens tokens; returns their number. The result follows from the arguments."""
    tokenizer, sampler, mixer = load_tokenizer(), Sampler(seed, split), Mixer(mix)
    drawn: list[Drawn] = []
    predicted: list[np.ndarray] = []
    states: list[np.ndarray] = []
    total = 0
    while total < num_tokens:
        piece = []
        for _ in range(PIECE_DOCUMENTS):
            document = _draw(sampler, mixer.next_kind(), tokenizer)
            mixer.count(document.kind, len(document.ids))
            piece.append(document)
        for document, (tokens, rows) in zip(piece, _finish(model, piece, tokenizer), strict=True):
            drawn.append(document)
            predicted.append(tokens)
            states.append(rows)
        total = sum(len(document.ids) for document in drawn)
        print(f"{len(drawn)} documents, {total} tokens", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    names = list(MIX)
    np.savez(
        out / "documents.npz",
        ids=np.concatenate([np.array(document.ids, np.uint16) for document in drawn]),
        predicted=np.concatenate(predicted),
        turn_end=np.concatenate([document.turn_end for document in drawn]),
        offsets=np.cumsum([0, *(len(document.ids) for document in drawn)]),
        kinds=np.array([names.index(document.kind) for document in drawn], np.uint8),
        thinking=np.array([document.thinking for document in drawn]),
        kind_names=np.array(names),
    )
    np.save(out / "states.npy", np.concatenate(states))
    return total


def _draw(sampler: Sampler, kind: str, tokenizer: Tokenizer) -> Drawn:
    while True:
        document = make_document(sampler, kind)
        turns = [i for i, message in enumerate(document.messages) if message["role"] == "assistant"]
        if len(turns) > 1 and sampler.chance(EARLY_TURN_SHARE):
            document.messages = document.messages[: turns[sampler.between(0, len(turns) - 2)] + 1]
        ids = tokenizer.encode(render_text(document), add_special_tokens=False).ids
        flags = np.frombuffer(generated_flags(ids, tokenizer, document.enable_thinking), np.uint8)
        if len(ids) <= MAX_DOCUMENT_TOKENS and flags.any():
            stop = int(np.flatnonzero(flags)[-1]) + 1
            return Drawn(ids[:stop], kind, document.enable_thinking, _turn_ends(flags[:stop]))


def _turn_ends(flags: np.ndarray) -> np.ndarray:
    """flags [T] of 0 and 1 -> for each 1 the position of the last 1 of its run, else -1."""
    ends = np.full(len(flags), -1, np.int32)
    last = -1
    for position in range(len(flags) - 1, -1, -1):
        if not flags[position]:
            last = -1
            continue
        last = position if last < 0 else last
        ends[position] = last
    return ends


def _finish(model: Volundr, piece: list[Drawn], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Let nano write the last turn of every document; returns predicted [T] and states of each.

    As long as the generator's words are nano's own choice one forward pass has found nano's answer; from the first
    other word on nano continues by itself.
    """
    stops = frozenset(tokenizer.encode("<|agens_end|><|endoftext|>").ids)
    found = _forward(model, [document.ids for document in piece])
    answers: dict[int, list[int]] = {}
    for i, (document, (predicted, _)) in enumerate(zip(piece, found, strict=True)):
        written = np.array(document.ids[document.last_turn_start :])
        chosen = predicted[document.last_turn_start - 1 : -1]
        differs = np.flatnonzero(chosen != written)
        if len(differs):
            answers[i] = chosen[: differs[0] + 1].tolist()
    begun = [i for i, answer in answers.items() if answer[-1] not in stops]
    if begun:
        generate = greedy_backend(model, max_tokens=MAX_NEW_TOKENS, stop_ids=stops)
        prompts = [piece[i].ids[: piece[i].last_turn_start] + answers[i] for i in begun]
        for i, rest in zip(begun, generate(prompts), strict=True):
            answers[i] += rest
    for i, answer in answers.items():
        piece[i].replace_last_turn(answer)
    for i, again in zip(answers, _forward(model, [piece[i].ids for i in answers]), strict=True):
        found[i] = again
    return found


@torch.inference_mode()
def _forward(model: Volundr, rows: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """predicted [T] uint16 and states [T, (n_taps + 1) * C] float16 of each row."""
    found: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0), np.zeros(0))] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    while order:
        length = -(-len(rows[order[-1]]) // LENGTH_STEP) * LENGTH_STEP
        members = [order.pop() for _ in range(min(len(order), max(1, FORWARD_TOKENS // length)))]
        ids = torch.zeros((len(members), length), dtype=torch.long)
        for b, i in enumerate(members):
            ids[b, : len(rows[i])] = torch.tensor(rows[i])
        hidden, taps = model(model.fresh_batch(ids), taps=TAPS)
        predicted = model.logits(hidden).argmax(-1).unflatten(0, ids.shape).numpy().astype(np.uint16)
        states = torch.cat([*taps, hidden], -1).unflatten(0, ids.shape).half().numpy()
        for b, i in enumerate(members):
            found[i] = (predicted[b, : len(rows[i])].copy(), states[b, : len(rows[i])].copy())
    return found
