"""The HTTP edge: schemas, one error handler, thin routes."""
