"""The questions of the package without a server: arguments, and the functions that take them."""
