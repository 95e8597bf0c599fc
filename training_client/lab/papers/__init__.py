"""The experiments of five papers: what they print, what is run here, and the results file."""
