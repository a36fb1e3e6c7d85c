"""How inference engines save and load their KV caches. Each module imports its own engine."""
