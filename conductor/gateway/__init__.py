"""An OpenAI-compatible gateway: the conductor places each request, and the gateway proxies the
bytes between client and instance."""
