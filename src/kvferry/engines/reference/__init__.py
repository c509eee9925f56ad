"""The reference engine: a small paged-attention Llama on numpy with OpenAI's API.

It runs alone, as prefill or as decode, and is the example that an engine's author copies: the part
that hands KV over is ``handoff.py``. Reading order: ``server`` (one process), ``http`` and ``api``
(requests), ``loop`` and ``scheduler`` (continuous batching), ``connector`` and ``handoff`` (the
seam to kvferry), ``model``, ``kvcache`` and ``weights`` (the numerics).
"""
