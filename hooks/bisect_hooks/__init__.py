"""What to listen to in a model and how to line it up.  Light: importing this package imports neither transformers nor megatron."""
