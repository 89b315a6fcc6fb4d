"""Roost's router: keeps each coding-agent conversation on the SGLang replica that holds its KV cache."""

__version__ = "0.1.0"
