"""An answer as blocks in the order they were written: thought, text, tool call. Responses and Messages speak in these.

deltas   R R R C C T0 T0 T0 T1 T1
blocks  [ 0   ][1 ][ 2    ][ 3  ]     one is open at a time; a block that was closed stays closed
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from agens_engine.core import FinishReason, StepEvent
from agens_engine.server.answer import ChoiceAnswer, merge_deltas
from agens_engine.server.dialect import Reply
from agens_engine.server.job import Job
from agens_engine.text.output import ContentDelta, Delta, ReasoningDelta, ToolCallDelta


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    """index: place in the answer; pieces: thought, text, or the JSON of the arguments; complete: the model finished it
    (a call that was cut off never is: case A10)."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockReply(Reply):
    """A reply made of blocks; a dialect writes the frames of one block and the object of the whole answer.

    blocks   those of the answer so far; the last one may still grow
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._call_index: int | None = None

    @abstractmethod
    def opened(self, block: Block) -> bytes: ...

    @abstractmethod
    def grown(self, block: Block, text: str) -> bytes: ...

    @abstractmethod
    def closed(self, block: Block) -> bytes: ...

    @abstractmethod
    def final(self) -> dict[str, Any]:
        """The object of the finished answer."""

    def whole(self, answers: Sequence[ChoiceAnswer]) -> dict[str, Any]:
        (answer,) = answers
        self._frames(answer.deltas, self.ends[0])
        return self.final()

    def event_frames(self, index: int, event: StepEvent) -> bytes:
        return self._frames(event.deltas, event)

    def _frames(self, deltas: list[Delta], event: StepEvent) -> bytes:
        frames = b"".join(self._grow(delta) for delta in merge_deltas(deltas))
        if event.finish_reason is not None and self._open is not None:
            if self._open.kind is BlockKind.CALL:
                complete = not self.job.watch(0).call_cut_off
            else:
                complete = event.finish_reason is FinishReason.STOP
            frames += self._close(complete)
        return frames

    def _grow(self, delta: Delta) -> bytes:
        frames = b""
        block = self._open
        if block is None or not self._continues(block, delta):
            if block is not None:
                frames += self._close(True)
            block = _new_block(len(self.blocks), delta)
            self._call_index = delta.index if isinstance(delta, ToolCallDelta) else None
            self.blocks.append(block)
            self._open = block
            frames += self.opened(block)
        text = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        if text:
            block.pieces.append(text)
            frames += self.grown(block, text)
        return frames

    def _continues(self, block: Block, delta: Delta) -> bool:
        if isinstance(delta, ToolCallDelta):
            return block.kind is BlockKind.CALL and self._call_index == delta.index
        return block.kind is (BlockKind.REASONING if isinstance(delta, ReasoningDelta) else BlockKind.TEXT)

    def _close(self, complete: bool) -> bytes:
        assert self._open is not None
        block, self._open = self._open, None
        block.complete = complete
        return self.closed(block)


def _new_block(index: int, delta: Delta) -> Block:
    if isinstance(delta, ReasoningDelta):
        return Block(index, BlockKind.REASONING)
    if isinstance(delta, ContentDelta):
        return Block(index, BlockKind.TEXT)
    return Block(index, BlockKind.CALL, call_id=delta.id or "", name=delta.name or "")
