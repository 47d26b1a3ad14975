"""Weight formats: bit layouts, packing and unpacking. Imports torch and numpy, nothing of the engine."""
