"""Find the first layer, module and shard where a Megatron conversion stops agreeing with its Hugging Face original."""

__version__ = "0.1.0"
