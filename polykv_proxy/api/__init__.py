"""The public HTTP surface: the relay below ASGI, and our own routes."""
