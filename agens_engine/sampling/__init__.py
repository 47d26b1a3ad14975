"""Logits -> processed distribution -> token.

rules/      one rule a file, in the order of spec serving.md section 6
seeds.py    random numbers that depend on a request's seed and on a token's position only
draw.py     probabilities + a uniform number -> token
logprobs.py what the `logprobs` field reports
sampler.py  SequenceSampler: the rules with one request's settings and history
"""
