"""`tiffin bench gateway`: requests and streams through a gateway, beside a plain reverse proxy."""
