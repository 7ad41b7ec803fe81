"""Proxies side by side: a scripted engine, loads for it, and what stands between them.

Law: engine, load and every proxy are processes of their own, so that each one's processor time can be told. All speak HTTP/1.1 over
loopback; who can reach the engine by its unix socket does so, as the product does.
"""
