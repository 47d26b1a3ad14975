"""Draft tokens ahead of the target and check them against it.

source.py        what a draft source is
context_copy.py  the source that copies from the prompt and the answer so far
drafting.py      which source fills which slot
verify.py        accept or replace drafts, pure functions of probabilities and uniform numbers
stats.py         proposed, accepted and time, per source and slot
"""
