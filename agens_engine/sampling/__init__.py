"""Logits -> processed distribution -> token.

rules/      one rule a file, in the order of spec serving.md section 6
seeds.py    random numbers that depend on a request's seed and on a token's position only
draw.py     probabilities + a uniform number -> token
logprobs.py what the `logprobs` field reports
thought.py, repetition.py   whether a thought is open, and whether it goes round in circles
request_rules.py   which rules follow the text of a request: reasoning budget, grammar
sampler.py  SequenceSampler: the rules with one request's settings and history
"""
