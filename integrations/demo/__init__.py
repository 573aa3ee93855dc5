"""The demonstration behind ``ep-hooks demo``: a small mixture-of-experts model trained stock and with ep_hooks."""
