"""What a sequence keeps between steps: recurrent state, keys and values, far blocks, and where they live."""
