"""Layers and whole models: FP4Linear, FP8Linear, replace_linears, warmup, compact."""
