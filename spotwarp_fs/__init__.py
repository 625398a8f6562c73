"""SpotWarp: a copy-on-write workspace that outlives its node."""
