"""Differentiable architecture search: a super-net, distributions over its choices, and their cost."""
