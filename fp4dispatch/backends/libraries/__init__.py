"""Backends on cuBLASLt, cuDNN and FlashInfer."""
