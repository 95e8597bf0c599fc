"""The server: the application, what stands before it, and how it is started."""
