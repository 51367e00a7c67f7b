"""What a checkpoint's configuration says about quantisation, read and written."""
