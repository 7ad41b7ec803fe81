"""polykv-proxy: shared prompt memory for fleets of agents on a local engine."""
