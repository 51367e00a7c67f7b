"""What is captured: the layers of a model cut at breaks, the bridges between segments, decode steps as one graph."""
