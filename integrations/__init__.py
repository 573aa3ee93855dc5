"""Adapters for training frameworks, one module each; each imports its framework lazily."""
