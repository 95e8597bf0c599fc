"""Federated training with Flower: the app of a site, its budget, and the server's strategy."""
