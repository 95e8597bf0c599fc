"""A mutation run: each line of `table.toml` breaks the code, and a named test must find it."""
