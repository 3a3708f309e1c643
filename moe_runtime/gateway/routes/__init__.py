"""The HTTP routes, one module per group; each gives a router over a running service."""
