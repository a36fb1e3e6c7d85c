"""Processes of peers, each run by the Python of that peer's environment. They import no module of
Tiffin, so that no environment needs another one's libraries."""
