"""Other hosts: how they are reached (ssh.py), and what they are asked (calls.py here, answers.py over there)."""
