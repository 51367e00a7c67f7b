"""What the proof is tried on: small kernels with one fault each, and the shipped ones with a fault put in."""
