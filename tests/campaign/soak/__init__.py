"""A gateway, its conductor, engines and Redis under load for a long time, with kills of each."""
