"""Strings: messages to token ids and token ids to text, reasoning and tool calls. Knows nothing of engine or model."""
