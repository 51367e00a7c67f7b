"""What integrations of inference engines share: how a checkpoint stores a fused layer, and its weights. No engine."""
