"""Projections of one input as one layer: q, k and v of attention, gate and up of an MLP."""
