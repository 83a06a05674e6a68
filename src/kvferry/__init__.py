"""kvferry moves the KV cache of a prompt from the worker that computed it to the worker that decodes it."""

__version__ = "0.1.0"
