"""The network: configuration, checkpoint, one file per layer kind, and the stack that joins them."""
