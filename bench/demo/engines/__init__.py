"""The demo's engine processes, their model and their prompts."""
