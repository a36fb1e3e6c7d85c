"""Helper programs that the conductor's measurements start as processes of their own."""
