"""One file per kind of training document; corpus.py mixes them."""
