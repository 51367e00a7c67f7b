"""What a benchmark compares: our layers and operators, and their peers."""
