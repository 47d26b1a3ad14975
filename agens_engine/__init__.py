"""Agens Engine: an inference engine for Agens Volundr.

Imports point one way: cli, server -> text, engine -> scheduler -> speculate, sampling -> model -> memory ->
agens_kernels, agens_quant. core.py and errors.py lie at the bottom. tests/unit/test_layering.py keeps it so.
"""

__version__ = "0.1.0"
