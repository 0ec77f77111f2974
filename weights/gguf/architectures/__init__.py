"""GGUF's architectures: what their files hold, under mlx-lm's names."""
