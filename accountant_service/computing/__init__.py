"""Calculations with a limit of time, in processes of their own, in fair turns."""
