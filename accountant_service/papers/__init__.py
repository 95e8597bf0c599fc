"""The claims of published papers, recomputed."""
