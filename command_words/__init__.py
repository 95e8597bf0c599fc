"""The words of mistakes on a command line, shared by both programs."""
