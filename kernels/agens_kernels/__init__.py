"""Compute kernels beside their plain torch references. Imports torch, triton and numpy, nothing of ours."""
