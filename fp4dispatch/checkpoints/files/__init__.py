"""The files of a checkpoint: open, check, write, and publish atomically."""
