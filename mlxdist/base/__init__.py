"""What every floor uses: errors, variables, files, processes of our own. It imports nothing of the floors above."""
