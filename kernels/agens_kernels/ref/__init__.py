"""Plain torch references, one file per op: the formula, float32, readable. Kernels are tested against these."""
