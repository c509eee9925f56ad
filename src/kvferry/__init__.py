"""kvferry moves a language model's KV cache from prefill to decode by the fastest path there is."""

__version__ = "0.1.0"
