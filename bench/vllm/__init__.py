"""`tiffin bench vllm`: what the pool adds to a real vLLM's time to the first token."""
