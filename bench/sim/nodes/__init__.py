"""What a simulated node is made of: its network card, its tiers."""
