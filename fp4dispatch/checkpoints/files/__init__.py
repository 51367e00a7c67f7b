"""The files of a checkpoint: opened, checked, written and published whole."""
