"""The sampling rules, one file each. Every rule maps rows [R, V] to rows [R, V].

A rule depends on its arguments alone. It writes into the rows it is given, which belong to the caller (SequenceSampler
copies the model's logits once), and returns them. A token that is ruled out has the value -inf.
"""
