"""`polykv-proxy top`: a running proxy in a terminal. Law: knows only the public routes, so any proxy will do, near or far."""
