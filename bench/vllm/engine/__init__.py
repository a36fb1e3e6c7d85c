"""What runs in the Python of an environment that has vLLM: an engine, and what is asked of it."""
