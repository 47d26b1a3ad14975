"""Quality of low-bit weights on a real small model; eval_quant_real_model.py is the command."""
