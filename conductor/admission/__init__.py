"""Admission control, the cost of rejections, and hedged requests. Pure."""
