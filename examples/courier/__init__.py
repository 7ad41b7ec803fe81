"""The courier: brings packages of work to a shared pool, as many at a time as keep a floor of tokens per second.

Law: knows the HTTP API of the proxy and nothing of its code. `courier.py` decides when a worker starts; the rest is what it needs.
"""
