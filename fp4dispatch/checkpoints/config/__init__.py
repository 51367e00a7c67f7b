"""Read and write the quantisation configuration of a checkpoint."""
