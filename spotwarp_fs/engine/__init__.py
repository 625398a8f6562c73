"""Trio tasks and their order: requests, cuts, sealing, publishing, hydrating, sessions."""
