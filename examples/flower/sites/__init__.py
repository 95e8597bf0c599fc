"""A Flower app for several sites: `client_app` runs at each site, `server_app` at the server."""
