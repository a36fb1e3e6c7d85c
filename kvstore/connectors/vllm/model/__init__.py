"""What decides the bytes of a KV cache, and what is refused: engines, models, requests."""
