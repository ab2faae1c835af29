"""Errors, variables, files and child processes, for every floor. It imports nothing from the floors above."""
