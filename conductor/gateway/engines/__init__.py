"""The engine instances: a cache of their addresses, and the HTTP client that calls them."""
