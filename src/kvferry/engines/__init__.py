"""Inference engines that use kvferry; ``reference`` is the example to copy."""
