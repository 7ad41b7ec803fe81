"""Clients that people use, against a real engine with a tiny model: what they see through the proxy is what the engine says.

Law: a client that is not on this machine skips its tests with the reason; nothing is fetched but packages by name.
"""
