"""Programs that use the proxy as a client would: over HTTP, and by nothing else."""
