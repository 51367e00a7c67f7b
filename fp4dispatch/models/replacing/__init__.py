"""Which modules of a model become quantised layers, and what keeps others as they are."""
