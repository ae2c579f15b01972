"""The transformer and its weights: configuration, RoPE, checkpoints, the decoder, and where models are found."""
