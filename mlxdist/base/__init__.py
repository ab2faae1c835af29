"""What every floor uses: errors, variables, files, child processes. It imports nothing of the floors above."""
