"""Helper programs that the gateway's measurements start as processes of their own."""
