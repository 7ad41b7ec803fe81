"""The courier before a real engine, and how well the simulator knows that engine after a short probe.

Law: acts through the proxy as a client would; what the rules may see is what the HTTP API says.
"""
