"""An OpenAI-compatible gateway: asks the conductor, then passes bytes through."""
