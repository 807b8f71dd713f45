"""Reads launch scripts without executing them: what they tell Megatron, and the line that tells it."""
