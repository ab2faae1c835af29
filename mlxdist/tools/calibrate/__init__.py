"""`mlxdist calibrate`: how fast each host and their links are, the fastest algorithms, and the cost of exchanges.

measure.py runs on every host, ranks.py in the ranks of a job; hosts.py and algorithms.py judge and show the results.
"""
