"""The text side of one checkpoint: its tokenizer and its chat template, loaded together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agens_engine.errors import CheckpointError
from agens_engine.model_files import model_name, resolve_model
from agens_engine.text.grammars import GrammarCompiler
from agens_engine.text.template import ChatTemplate
from agens_engine.text.tokenizer import Tokenizer, read_json


@dataclass(frozen=True)
class ModelText:
    """`name` is what clients call the model."""

    name: str
    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: GrammarCompiler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", GrammarCompiler(self.tokenizer))

    @classmethod
    def load(cls, model: str) -> ModelText:
        """Resolve the name and load tokenizer and template.

        raises   UsageError for a name that leads nowhere, CheckpointError for a folder that is not a checkpoint
        """
        directory = resolve_model(model)
        tokenizer = Tokenizer.load(directory)
        return cls(model_name(model), directory, tokenizer, ChatTemplate.load(directory, tokenizer))

    def unused_ids(self) -> list[int]:
        """Ids the engine must never generate: embedding rows without a token, and what generation_config suppresses.

        raises   CheckpointError when the tokenizer has ids that the model has no row for
        """
        tokenizer = self.tokenizer
        config = read_json(self.directory / "config.json")
        rows = config.get("text_config", config).get("vocab_size")
        if not isinstance(rows, int):
            return []  # the model's own loading reports a config without vocab_size
        if tokenizer.vocab_size > rows:
            raise CheckpointError(
                f"{self.directory}: tokenizer.json has ids up to {tokenizer.vocab_size - 1}, but config.json has "
                f"vocab_size {rows}; the two belong to different models"
            )
        holes = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i)]
        return sorted({*holes, *range(tokenizer.vocab_size, rows), *(i for i in tokenizer.suppress_ids if i < rows)})
