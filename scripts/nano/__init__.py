"""Tools that make nano, the embedded model: text generator, tokenizer builder, dataset writer, trainer, scorer."""
